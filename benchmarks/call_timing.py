# SPDX-License-Identifier: Apache-2.0
"""Median time of one call, and the copy bandwidth that rates are held against."""

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
