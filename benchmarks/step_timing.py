# SPDX-License-Identifier: Apache-2.0
"""Time, memory and kernels of a forward and backward pass, launched by Python or replayed as a CUDA graph."""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable

import torch

ON_GPU = torch.cuda.is_available()
# One stream for everything: autograd returns gradients on the stream that DDP saw when it wrapped the model, and a
# captured graph must not leave its stream.
STREAM = torch.cuda.Stream() if ON_GPU else None


def milliseconds(step: Callable[[], None], prepare: Callable[[], None], repeats: int, warm_up: int = 3) -> list[float]:
    """Time of every one of `repeats` calls of `step`; `prepare` comes before each and is not timed."""
    times = []
    for i in range(warm_up + repeats):
        prepare()
        if ON_GPU:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            step()
            end.record()
            torch.cuda.synchronize()
            elapsed = start.elapsed_time(end)
        else:
            begin = time.perf_counter()
            step()
            elapsed = 1e3 * (time.perf_counter() - begin)
        if i >= warm_up:
            times.append(elapsed)
    return times


def captured(loss_of: Callable[[], torch.Tensor], clear: Callable[[], None]) -> Callable[[], torch.Tensor]:
    """Forward and backward as a CUDA graph; the function replays it and returns the loss."""
    for _ in range(3):
        clear()
        loss_of().backward()
    clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=STREAM):
        loss = loss_of()
        loss.backward()

    def replay():
        graph.replay()
        return loss

    return replay


def measure(step: Callable[[], torch.Tensor], clear: Callable[[], None], tokens: int, repeats: int) -> dict:
    """Median time, speed, memory and loss of `step`, a forward and backward pass that returns the loss."""
    losses = []
    times = milliseconds(lambda: losses.append(step().detach()), clear, repeats)
    median = statistics.median(times)
    return {
        "ms": round(median, 3),
        "ms_min": round(min(times), 3),
        "ms_max": round(max(times), 3),
        "repeats": repeats,
        "tokens_per_s": round(1e3 * tokens / median, 1),
        "loss": losses[-1].item(),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if ON_GPU else None,
    }


def figures(loss_of, clear, tokens: int, options, name: str, graph: bool = False) -> tuple[dict | None, dict | None]:
    """What `measure` finds, and the profile where one is wanted; None where memory does not suffice."""

    def step():
        loss = loss_of()
        loss.backward()
        return loss

    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    try:
        if graph:
            step = captured(loss_of, clear)
        found = measure(step, clear, tokens, options.repeats)
        return found, profiled(step, clear) if name in options.profile and ON_GPU else None
    except torch.OutOfMemoryError:
        return None, None
    except Exception as error:  # a variant that cannot run must not cost the figures of the others
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"[:300]}, None
    finally:
        clear()
        step = None
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()


def profiled(step: Callable[[], object], clear: Callable[[], None], top: int = 20) -> dict:
    """Kernels of one step by their own device time, and operators by their own device and host time."""
    from torch.profiler import ProfilerActivity, profile

    clear()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    averages = profiler.key_averages()
    found = [e for e in averages if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    operators = [e for e in averages if e.device_type == torch.autograd.DeviceType.CPU]

    def rows(events, time_of):
        events = sorted(events, key=time_of, reverse=True)[:top]
        return [[e.key[:110], e.count, round(time_of(e) / 1e3, 3)] for e in events]

    return {
        "device_ms": round(sum(e.self_device_time_total for e in found) / 1e3, 3),
        "launches": sum(e.count for e in found),
        "kernels": rows(found, lambda e: e.self_device_time_total),
        "operators": rows(operators, lambda e: e.self_device_time_total),
        "host": rows(operators, lambda e: e.self_cpu_time_total),
    }


def say(**values) -> None:
    """A line of progress, beside Megatron's own printing."""
    print(json.dumps(values), file=sys.stderr, flush=True)
