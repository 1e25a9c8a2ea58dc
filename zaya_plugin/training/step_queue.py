# SPDX-License-Identifier: Apache-2.0
"""Steps whose numbers are still on the device: the loop goes on, and each is reported once its numbers have arrived.

A loop that reads its loss every step lets the device run dry every step: it can launch nothing while it waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zaya_plugin.optim.host_copy import HostCopy


class StepQueue:
    """Reports in the order of `add`, each when it is complete; on the CPU that is at once. Holds one step at most."""

    def __init__(self):
        self._waiting: tuple[HostCopy, Callable[[list[Tensor]], None]] | None = None

    def add(self, tensors: Sequence[Tensor], report: Callable[[list[Tensor]], None]) -> None:
        """To call `report` with `tensors` on the host, as they are now on the device. Waits for the one before."""
        self.flush()
        self._waiting = HostCopy(tensors), report
        self.poll()

    def poll(self) -> None:
        """Reports what has arrived; waits for nothing."""
        if self._waiting and self._waiting[0].is_complete:
            self.flush()

    def flush(self) -> None:
        """Waits for what was added, and reports it."""
        if self._waiting:
            (copy, report), self._waiting = self._waiting, None
            report(copy.read())


class StepClock:
    """Seconds from the end of one step to the end of the next, as the device sees them; the host may be far ahead.

    on_device: whether steps end on a GPU; else by the host's clock.
    """

    def __init__(self, on_device: bool):
        self.on_device = on_device
        self._start: torch.cuda.Event | float | None = None

    def restart(self) -> None:
        """What lies between the last step and now does not count: a validation, a checkpoint."""
        if self._start is not None:
            self._start = self._now()

    def lap(self, first: Callable[[], float]) -> Callable[[], float]:
        """At the end of a step: a function that gives its seconds, to be called once the device is past this point. first: says so of
        the first step, whose beginning was not seen."""
        if self._start is None:
            seconds = first()
            self._start = self._now()
            return lambda: seconds
        start, self._start = self._start, self._now()
        end = self._start

        def seconds() -> float:
            if not self.on_device:
                return end - start
            if not end.query():
                end.synchronize()
            return start.elapsed_time(end) / 1000

        return seconds

    def _now(self) -> torch.cuda.Event | float:
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
