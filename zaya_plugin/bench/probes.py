# SPDX-License-Identifier: Apache-2.0
"""Measures rates of matrix products and copies, for `zaya bench` and `zaya verify`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

# (extent of the product, MiB of the copy, calls); together hundreds of milliseconds on an accelerator, tens on a CPU
ON_ACCELERATOR, ON_CPU = (8192, 1024, 40), (512, 32, 10)


@dataclass(frozen=True)
class Rates:
    """Rates per second. gemm: operations of a square product in the model's dtype. copy: bytes read and written by a
    copy.
    """

    gemm: float
    copy: float


def measure(device, dtype) -> Rates:
    """Return the rates of `device` (torch.device) in the model's dtype. Allocates 2 GiB there and frees them."""
    import torch

    extent, mebibytes, calls = ON_CPU if device.type == "cpu" else ON_ACCELERATOR
    rates = Rates(
        product_rate(extent, extent, extent, device, dtype, calls), copy_rate(mebibytes * 2**20, device, calls)
    )
    if device.type != "cpu":
        torch.cuda.empty_cache()
    return rates


def product_rate(m: int, k: int, n: int, device, dtype, calls: int) -> float:
    """Return operations a second of [m, k] @ [k, n]: hipBLASLt's or cuBLAS' on an accelerator."""
    import torch

    left = torch.randn(m, k, device=device, dtype=dtype)
    right = torch.randn(k, n, device=device, dtype=dtype)
    out = left.new_empty(m, n)
    return 2.0 * m * k * n / seconds(lambda: torch.mm(left, right, out=out), device, calls)


def copy_rate(size: int, device, calls: int) -> float:
    """Return bytes a second, read and written, of a copy of `size` bytes."""
    import torch

    source = torch.zeros(max(1, size // 4), device=device)
    target = torch.empty_like(source)
    return 8.0 * source.numel() / seconds(lambda: target.copy_(source), device, calls)


def seconds(call: Callable[[], object], device, calls: int) -> float:
    """Return the time of `call`: on a device the median, on a CPU, where other processes disturb the measurement, the
    minimum.
    """
    times = call_seconds(call, device, calls)
    return min(times) if device.type == "cpu" else statistics.median(times)


def call_seconds(call: Callable[[], object], device, calls: int) -> list[float]:
    """Return the times of `calls` calls after two calls of warm-up; on a device between events around each call."""
    import torch

    for _ in range(2):
        call()
    if device.type == "cpu":
        times = []
        for _ in range(calls):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return times
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)]
