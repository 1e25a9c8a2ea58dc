# SPDX-License-Identifier: Apache-2.0
"""Median time of one call, launched or replayed as a graph, its kernels, and the copy bandwidth that rates are held against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def milliseconds(call: Callable, device: torch.device, rep: int) -> float:
    """Median; on a GPU triton's do_bench over `rep` milliseconds, which clears L2 before each call, on a CPU the last three of four calls."""
    if device.type == "cuda":
        from triton.testing import do_bench

        return do_bench(call, warmup=max(rep // 4, 25), rep=rep, return_mode="median")
    times = []
    for _ in range(4):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def copy_bandwidth(device: torch.device, rep: int = 300) -> float:
    """Bytes read and written a second by Tensor.copy_ of 1 GiB (32 MiB on a CPU)."""
    source = torch.randn(2**28 if device.type == "cuda" else 2**23, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / milliseconds(lambda: target.copy_(source), device, rep) * 1e3


def graphed(make_call: Callable[[], Callable]) -> Callable:
    """Replays a call: without the time that the host takes to launch it. What it needs is made on the stream of the capture, for autograd runs
    a backward on its forward's: the current stream, or a new one where that is the default stream, which cannot be captured."""
    current = torch.cuda.current_stream()
    stream = torch.cuda.Stream() if current == torch.cuda.default_stream() else current
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        call = make_call()
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            call()
    current.wait_stream(stream)
    return lambda kept=call: graph.replay()  # kept: what autograd saved, which the replay reads


def kernel_times(call: Callable, calls: int = 10) -> dict[str, float]:
    """Microseconds a call of each kernel, by torch's profiler, longest first."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(calls):
            call()
        torch.cuda.synchronize()
    found = {
        event.key: round(event.device_time_total / calls, 2)
        for event in profile.key_averages()
        if event.device_time_total
    }
    return dict(sorted(found.items(), key=lambda item: -item[1]))
