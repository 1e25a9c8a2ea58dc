# SPDX-License-Identifier: Apache-2.0
"""Measures inside one rank of Megatron's loop: warm-up, timed steps without a profiler, then one traced step.

Steps are numbered from 0 in the order in which Megatron starts them. From `warmup` to `warmup + steps` nothing is
attached to the run; the next step warms the profiler, the one after it is traced, and the run ends before the following
one. Every rank counts the steps; rank 0 traces. If the step is a replayed graph, whose kernels lie in no range of the
host, the last step before its capture is traced too, to learn the part of each kernel.
"""

import resource
import time
from collections.abc import Callable
from pathlib import Path

from zaya_plugin.bench.options import Options
from zaya_plugin.bench.step_parts import PASSES, RANGE, STEP, Ranges, annotated


class Session:
    """The measurement; `before_step` is called before every step of Megatron's loop.

    Args:
        device_type: "cpu" or "cuda".
        trace: file of the trace. reference: file of the trace of the step before a graph.
        say: prints a line for the user.

    Attributes:
        moments: seconds of the host's clock before the first timed step and behind each; the device is idle at both
            ends.
        memory_gib: allocated and reserved at most on the device (0 on a CPU), and resident on the host.
        learned: whether `reference` is written.
    """

    def __init__(
        self, options: Options, rank: int, device_type: str, trace: Path, reference: Path, say: Callable[[str], None]
    ):
        self.options, self.rank, self.on_cpu, self.say = options, rank, device_type == "cpu", say
        self.trace, self.reference = trace, reference
        self.begun, self.learned = 0, False
        self.moments: list[float] = []
        self.memory_gib = (0.0, 0.0, 0.0)
        self.parts = self.profiler = self.ranges = None

    def before_step(self, parts) -> None:
        """Time, trace or end the run, by the number of the step. parts: zaya_plugin.hosts.measured_steps.StepParts."""
        import torch

        from zaya_plugin.hosts.measured_steps import graph_warm_up

        step, self.begun, self.parts = self.begun, self.begun + 1, parts
        eager = graph_warm_up(parts.args)
        self.learned = eager > 0
        first = max(self.options.warmup, eager + 1)  # the step of the capture is not timed
        last = first + self.options.steps
        if step in (first, last):
            self.say("tracing one step" if step == last else f"timing {self.options.steps} steps")
            self._synchronize()
        if step == first and not self.on_cpu:
            torch.cuda.reset_peak_memory_stats()
        if first <= step <= last:
            self.moments.append(time.perf_counter())
        if step == last:
            resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 2**10
            device = (
                (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if not self.on_cpu else (0, 0)
            )
            self.memory_gib = tuple(size / 2**30 for size in (*device, resident))
        if self.rank == 0:
            self._trace_at(step, last + 1, self.trace)
            self._trace_at(step, eager - 1, self.reference)
        if step == last + 2:
            raise SystemExit(0)

    def _trace_at(self, step: int, traced: int, file: Path) -> None:
        """Do what the trace of the step `traced` requires before `step`; none for a negative number. The step before it,
        if there is one, warms the profiler.
        """
        if step == max(traced - 1, 0) and traced >= 0:
            self._attach(file, warmup=min(traced, 1))
        if step == traced:
            self._synchronize()
            if traced:
                self.profiler.step()
            self._open()
        if step == traced + 1 > 0:
            self._synchronize()
            self.ranges.close()
            self.profiler.stop()

    def _attach(self, file: Path, warmup: int) -> None:
        """Start a profiler that warms up for `warmup` steps, traces one and writes it to `file`."""
        from torch.profiler import ProfilerActivity, profile, schedule

        self.profiler = profile(
            activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not self.on_cpu),
            schedule=schedule(wait=0, warmup=warmup, active=1, repeat=1) if warmup else None,
            on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(file)),
        )
        self.profiler.start()

    def _open(self) -> None:
        """Put ranges around the step, which begins, and all of its parts."""
        from megatron.core.utils import get_model_config, unwrap_model
        from torch.profiler import record_function

        from zaya_plugin.training import balancer

        parts, self.ranges = self.parts, Ranges()
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
        self.ranges.enter_context(record_function(STEP))

    def _synchronize(self) -> None:
        import torch

        if not self.on_cpu:
            torch.cuda.synchronize()


def _ranged_loss(forward_step: Callable) -> Callable:
    """Return `forward_step` with its loss function in a range too."""

    def step(*positional, **named):
        output, reduce_loss = forward_step(*positional, **named)
        return output, annotated(reduce_loss, f"{RANGE}head")

    return step
