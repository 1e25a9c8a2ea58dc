# SPDX-License-Identifier: Apache-2.0
"""Measures inside one rank of Megatron's loop: warm-up, timed steps without a profiler, then one traced step.

Steps are numbered from 0 in the order in which Megatron starts them. From `warmup` to `warmup + steps` nothing is
attached to the run; the next step warms the profiler, the one after it is traced, and the run ends before the following
one. Every rank counts the steps; rank 0 traces. If the step is a replayed graph, whose kernels lie in no range of the
host, the last step before its capture is traced too, to learn the part of each kernel.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from zaya_plugin.bench.options import Options
from zaya_plugin.bench.step_parts import PASSES, STEP, Ranges, accumulated, annotated, ranged


@dataclass
class Measured:
    """Results of one rank. seconds: of every timed step by the host's clock; the device is idle before the first step
    and after the last. On a CPU only the resident memory is measured; the other GiB are None."""

    seconds: list[float] = field(default_factory=list)
    mean_seconds: float = 0.0
    allocated_gib: float | None = None
    reserved_gib: float | None = None
    resident_gib: float = 0.0

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)


class Session:
    """The measurement; `before_step` is called before every step of Megatron's loop.

    Args:
        device_type: "cpu" or "cuda".
        trace: file of the trace. reference: file of the trace of the step before a graph.
        say: prints a line for the user.
    """

    def __init__(
        self, options: Options, rank: int, device_type: str, trace: Path, reference: Path, say: Callable[[str], None]
    ):
        self.options, self.device_type, self.say = options, device_type, say
        self.trace, self.reference = trace, reference
        self.traces = rank == 0
        self.begun = 0
        self.measured = Measured()
        self.ranges = Ranges()
        self.profiler = self.window = None
        self.parts = None
        self.learned = False
        # from the last step whose backward pass Python ran (zaya_plugin.bench.step_parts.accumulated)
        self.accumulated: dict[str, int] = {}

    def before_step(self, parts) -> None:
        """Time, trace or end the run, by the number of the step. parts: zaya_plugin.hosts.measured_steps.StepParts."""
        from zaya_plugin.hosts.measured_steps import graph_warm_up

        step, self.begun, self.parts = self.begun, self.begun + 1, parts
        eager = graph_warm_up(parts.args)
        first = max(self.options.warmup, eager + 1)  # the step of the capture is not timed
        last = first + self.options.steps
        if self.traces and eager:
            self._learn(step - eager, eager, parts)
        if step == first:
            self._synchronize()
            self._reset_peak()
            self.say(f"timing {self.options.steps} steps")
            self.times = [time.perf_counter()]
        elif first < step < last:
            self.times.append(time.perf_counter())
        elif step == last:
            self._synchronize()
            self.times.append(time.perf_counter())
            self._take_times()
            if self.traces:
                self.say("tracing one step")
                self._attach(self.trace, wait=1)
        elif step == last + 1 and self.traces:
            self._synchronize()
            self.profiler.step()
            self._open(parts)
        elif step == last + 2:
            if self.traces:
                self._close()
                self.accumulated = self.accumulated or accumulated(parts.model)
            raise SystemExit(0)

    def _learn(self, to_capture: int, eager: int, parts) -> None:
        """Trace the last of `eager` steps before a graph is captured, after a step of warm-up if there is one."""
        if to_capture == -min(eager, 2):
            self._attach(self.reference, wait=min(eager, 2) - 1)
        if to_capture == -1:
            self._synchronize()
            if eager > 1:
                self.profiler.step()
            self._open(parts)
        if to_capture == 0:
            self._close()
            self.accumulated, self.learned = accumulated(parts.model), True

    def _take_times(self) -> None:
        import resource

        import torch

        measured = self.measured
        measured.seconds = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
        measured.mean_seconds = (self.times[-1] - self.times[0]) / self.options.steps
        measured.resident_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        if self.device_type != "cpu":
            measured.allocated_gib = torch.cuda.max_memory_allocated() / 2**30
            measured.reserved_gib = torch.cuda.max_memory_reserved() / 2**30

    def _attach(self, path: Path, wait: int) -> None:
        """Start a profiler that warms up for `wait` steps, traces one and writes it to `path`."""
        from torch.profiler import ProfilerActivity, profile, schedule

        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (self.device_type != "cpu")
        self.profiler = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=wait, active=1, repeat=1) if wait else None,
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        )
        self.profiler.start()

    def _open(self, parts) -> None:
        """Put ranges around all parts; the step begins."""
        from megatron.core.utils import get_model_config, unwrap_model
        from torch.profiler import record_function

        from zaya_plugin.training import balancer

        for chunk in parts.model:
            self.ranges.around(chunk, "zero_grad_buffer", "gradients")
            self.ranges.around_model(unwrap_model(chunk))
        self.ranges.around(parts.optimizer, "zero_grad", "gradients")
        self.ranges.around(parts.optimizer, "step", "optimizer")
        self.ranges.around(get_model_config(parts.model[0]), "finalize_model_grads_func", "gradients")
        self.ranges.around(balancer, "update_biases", "router")
        parts.forward_step = _ranged_loss(parts.forward_step)
        parts.forward_backward = annotated(parts.forward_backward, PASSES)
        self._synchronize()
        self.window = record_function(STEP)
        self.window.__enter__()

    def _close(self) -> None:
        """End the step and the trace, and remove the ranges."""
        self._synchronize()
        self.window.__exit__(None, None, None)
        self.profiler.stop()
        self.profiler = self.window = None
        self.ranges.remove()

    def _synchronize(self) -> None:
        import torch

        if self.device_type != "cpu":
            torch.cuda.synchronize()

    def _reset_peak(self) -> None:
        import torch

        if self.device_type != "cpu":
            torch.cuda.reset_peak_memory_stats()


def _ranged_loss(forward_step: Callable) -> Callable:
    """Return `forward_step` with its loss function in a range too."""

    def step(*positional, **named):
        output, reduce_loss = forward_step(*positional, **named)
        return output, ranged(reduce_loss, "head")

    return step
