# SPDX-License-Identifier: Apache-2.0
"""Measure the median time of a call, launched or replayed as a graph, the times of its kernels, and the copy
bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def milliseconds(call: Callable, device: torch.device, rep: int) -> float:
    """Return the median time of `call`. On a GPU it is triton's do_bench over `rep` milliseconds, which clears L2
    before each call; on a CPU the median of the last three of four calls.
    """
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
    """Return the bytes read and written per second by Tensor.copy_ of 1 GiB (32 MiB on a CPU)."""
    source = torch.randn(2**28 if device.type == "cuda" else 2**23, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() * 4 / milliseconds(lambda: target.copy_(source), device, rep) * 1e3


def graphed(make_call: Callable[[], Callable]) -> Callable:
    """Return a function that replays a captured graph of the call, without the time of the host's launches.

    The call's tensors are made on the stream of the capture, because autograd runs a backward pass on the stream of its
    forward pass. That stream is the current one, or a new one where the current stream is the default stream, which
    cannot be captured.
    """
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
    return lambda kept=call: graph.replay()  # kept: autograd's saved tensors, which the replay reads


def kernel_times(call: Callable, calls: int = 10) -> dict[str, float]:
    """Return the microseconds per call of each kernel, from torch's profiler, longest first."""
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
