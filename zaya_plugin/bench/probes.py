# SPDX-License-Identifier: Apache-2.0
"""Measures rates of matrix products, copies and collectives, for `zaya bench` and `zaya verify`."""

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
    """Return the time of `call` after two calls of warm-up: on a device the median between events around each call, on
    a CPU, where other processes disturb the measurement, the minimum."""
    import torch

    for _ in range(2):
        call()
    if device.type == "cpu":
        times = []
        for _ in range(calls):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return min(times)
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in zip(events, events[1:], strict=False)) / 1e3


def numbers_and_sum(count: int, device, rank: int, ranks: int):
    """Return the fp32 numbers that `rank` gives to an all-reduce, and their exact sum over the ranks.

    Elements at a distance that is not a multiple of the prime 251 differ, so data at a wrong place changes the sum.
    """
    import torch

    pattern = (torch.arange(count, device=device, dtype=torch.int32) % 251).float()
    return pattern + rank, pattern.mul_(ranks) + ranks * (ranks - 1) / 2


def all_reduce(sizes, device, calls: int) -> list[dict]:
    """Measure an all-reduce of each of `sizes` (bytes of fp32) over the default group; every rank calls it.

    Returns, the same on all ranks: bytes; ms of the slowest rank; gb_per_s that a device sends, 2 (n - 1) / n of the
    bytes a call (NCCL's "bus" bandwidth); right: whether every element is the exact sum.
    """
    import torch
    import torch.distributed as distributed

    ranks, results = distributed.get_world_size(), []
    for size in sizes:
        numbers, expected = numbers_and_sum(max(1, size // 4), device, distributed.get_rank(), ranks)
        total = numbers.clone()
        distributed.all_reduce(total)
        right = (total == expected).all().to(torch.float32)
        distributed.barrier()
        mean = seconds(lambda numbers=numbers: distributed.all_reduce(numbers), device, calls)
        worst = torch.tensor([mean, -right], device=device)
        distributed.all_reduce(worst, distributed.ReduceOp.MAX)
        slowest, wrong = worst.tolist()
        sent = 2 * (ranks - 1) / ranks * numbers.nbytes
        row = {"bytes": numbers.nbytes, "ms": 1e3 * slowest, "gb_per_s": sent / slowest / 1e9, "right": wrong == -1.0}
        results.append(row)
    return results
