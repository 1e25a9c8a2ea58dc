# SPDX-License-Identifier: Apache-2.0
"""Results that the loop reads one step late, so that it never waits for the device: steps' numbers, their times,
signals to end.

A loop that reads its loss in every step launches nothing while it waits, so the device is idle in every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zaya_plugin.checkpoint.saver import FREE, Saver
from zaya_plugin.optim.chained import HostCopy
from zaya_plugin.training import heartbeat
from zaya_plugin.training.loss_guard import RollBackError


class StepQueue:
    """Reports steps in the order of `add`, each when its numbers are on the host; on the CPU at once. It holds at most
    one step.
    """

    def __init__(self):
        self._waiting: tuple[int, HostCopy, Callable[[list[Tensor]], None]] | None = None

    def add(self, step: int, tensors: Sequence[Tensor], report: Callable[[list[Tensor]], None]) -> None:
        """Schedule `report` with copies of `tensors` on the host. Reports the step before first, and waits for it."""
        self.flush()
        self._waiting = step, HostCopy(tensors), report
        self.poll()

    def poll(self) -> None:
        """Report the held step if its numbers have arrived. Does not wait."""
        if self._waiting and self._waiting[1].is_complete:
            self.flush()

    def flush(self, until: int | None = None) -> None:
        """Wait for the held step and report it, unless it is after the step `until`."""
        if self._waiting and (until is None or self._waiting[0] <= until):
            (_, copy, report), self._waiting = self._waiting, None
            report(copy.read())


class StepClock:
    """Measures the seconds from the end of one step to the end of the next.

    on_device: measure by events on the GPU, since the host may be far ahead; else by the host's clock.
    """

    def __init__(self, on_device: bool):
        self.on_device = on_device
        self._start: torch.cuda.Event | float | None = None
        self._ready: torch.cuda.Event | float | None = None

    def restart(self) -> None:
        """Exclude the time since the last step, e.g. a validation or a checkpoint."""
        if self._start is not None:
            self._start = self._now()

    def lap(self, first: Callable[[], float]) -> Callable[[], float]:
        """Mark the end of a step. Return a function that returns its seconds; it waits until the device is past this
        point.

        first: returns the seconds of the first step, whose start was not marked.
        """
        if self._start is None:
            seconds = first()
            self._start = self._now()
            return lambda: seconds
        start, self._start = self._start, self._now()
        return self._between(start, self._start)

    def gradients_ready(self) -> None:
        """Mark the point of a step at which this rank's own gradients are complete."""
        if heartbeat.is_on() and not (self.on_device and torch.cuda.is_current_stream_capturing()):
            self._ready = self._now()

    def until_gradients(self) -> Callable[[], float | None]:
        """Return a function that returns the seconds from the start of the step to `gradients_ready`; call it before
        `lap`. None: one of them was not marked, as in a step that is one graph.

        The steps of all ranks take the same time, since they wait for each other; these seconds show the slow one.
        """
        ready, self._ready = self._ready, None
        return self._between(self._start, ready) if self._start is not None and ready is not None else lambda: None

    def _between(self, start, end) -> Callable[[], float]:
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


class StepMessage(NamedTuple):
    """The numbers of a rank that all ranks agree on after each step, on the largest of each.

    Attributes:
        signal: 1 once a signal to end was received.
        writer: the state of the process that writes the rank's checkpoints: FREE, BUSY or FAILED of saver.py.
        spike: the first step of a loss spike because of which the run is to roll back, or 0.
    """

    signal: int
    writer: int = FREE
    spike: int = 0


class AgreedSignal:
    """Takes the place of Megatron's DistributedSignalHandler in its loop: all ranks agree on a StepMessage, without a
    wait.

    Megatron gathers all ranks' flags after each step and reads them, which waits for all work of the device. In this
    queue the answer of the step before is read, which is on the host already. So a run ends one step later, and on all
    ranks at the same step.

    Args:
        handler: Megatron's handler, installed.
        device: of the process group's collectives; on "cpu" the answer of the same step is read.
        saver: states how its save stands, and gets the state of all ranks'; or None.
        spiked: returns the message's `spike`, 0 where no guard may roll back.

    Attributes:
        since: the time (monotonic) at which the signal was noticed on this rank, or None: set once all ranks agree on
            the signal, since decisions that follow from it have collectives.
    """

    def __init__(
        self,
        handler,
        device: torch.device | int | str,
        saver: Saver | None = None,
        spiked: Callable[[], int] = lambda: 0,
    ):
        self.handler = handler
        self.device = torch.device(device)
        self.saver = saver
        self.spiked = spiked
        self.since: float | None = None
        self._noticed: float | None = None
        self._before: tuple[HostCopy, int] | None = None

    def signals_received(self) -> list[int]:
        """Return [1] if any rank had received the signal, else [0]: the same on all ranks. All ranks must call it.

        Raises:
            RollBackError: a guard of any rank requests it. It is raised on all ranks, before a save at this step.
        """
        received = int(self.handler._signal_received)
        if received and self._noticed is None:
            self._noticed = time.monotonic()
        writer, saves = (FREE, 0) if self.saver is None else (self.saver.state, self.saver.count)
        own = StepMessage(received, writer, self.spiked())
        numbers = torch.cat(  # filled on the device: a copy from the host would wait
            [torch.full((1,), number, dtype=torch.int32, device=self.device) for number in own]
        )
        torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX)
        now = HostCopy([numbers]), saves
        before, self._before = self._before, now
        answer = now if self.device.type == "cpu" else before
        if answer is None:
            return [0]
        agreed = StepMessage(*answer[0].read()[0].tolist())
        if agreed.spike:
            raise RollBackError("a guard requests a roll back", first_step=agreed.spike)
        if self.saver is not None and answer[1] == self.saver.count:  # else it is about the save before
            self.saver.agree(agreed.writer)
        if agreed.signal and self.since is None:
            self.since = time.monotonic() if self._noticed is None else self._noticed
        return [agreed.signal]
