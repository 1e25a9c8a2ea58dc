# SPDX-License-Identifier: Apache-2.0
"""Measures rates of matrix products and copies, for `zaya bench` and `zaya verify`."""

import statistics
import timeit
from collections.abc import Callable
from dataclasses import dataclass

from zaya_plugin.plan.products import Product, square_product

# (extent of the product, MiB of the copy, calls); together hundreds of milliseconds on an accelerator, tens on a CPU
ON_ACCELERATOR, ON_CPU = (8192, 1024, 40), (512, 32, 10)


# BabelStream's kernels (https://github.com/UoB-HPC/BabelStream): weights of the arrays x and y in the result, where y of
# weight 0 is not read. Every array that is read or written counts once; a scale factor of 3 keeps the results exact.
STREAM = {"copy": (1, 0), "scale": (3, 0), "add": (1, 1), "triad": (1, 3)}
PERIOD = 251  # a prime: elements at other distances differ, so that data at a wrong place is wrong
CHECKED_AT_ONCE = 2**24  # elements


@dataclass(frozen=True)
class Measured:
    """work: operations or bytes of a call, and its time. wrong: of `elements` of the result, those that differ from the
    known one.
    """

    work: float
    seconds: float
    wrong: int
    elements: int

    @property
    def rate(self) -> float:
        return self.work / self.seconds


@dataclass(frozen=True)
class Rates:
    """Rates per second. gemm: operations of a square product in the model's dtype. copy: bytes read and written by a
    copy. wrong: what differs in their results: a device with bad memory.
    """

    gemm: float
    copy: float
    wrong: tuple[str, ...] = ()


def measure(device, dtype) -> Rates:
    """Return the rates of `device` (torch.device) in the model's dtype. Allocates 2 GiB there and frees them."""
    import torch

    extent, mebibytes, calls = ON_CPU if device.type == "cpu" else ON_ACCELERATOR
    gemm = product(square_product(extent), device, dtype, calls)
    copy = stream("copy", mebibytes * 2**20, device, calls)
    if device.type != "cpu":
        torch.cuda.empty_cache()
    wrong = (
        f"{result.wrong:,} of {result.elements:,} {what}"
        for result, what in ((gemm, "elements of a product are wrong"), (copy, "numbers of a copy differ"))
        if result.wrong
    )
    return Rates(gemm.rate, copy.rate, tuple(wrong))


def stream(kernel: str, size: int, device, calls: int) -> Measured:
    """Measure a kernel of STREAM over fp32 arrays of `size` bytes."""
    import torch

    count, (of_x, of_y) = max(1, size // 4), STREAM[kernel]
    x = torch.arange(count, device=device, dtype=torch.int32).remainder_(PERIOD).float()
    y, out = (x + 1 if of_y else x), torch.empty_like(x)
    kernels = {
        "copy": lambda: out.copy_(x),
        "scale": lambda: torch.mul(x, of_x, out=out),
        "add": lambda: torch.add(x, y, out=out),
        "triad": lambda: torch.add(x, y, alpha=of_y, out=out),
    }
    time, wrong = seconds(kernels[kernel], device, calls), 0
    for start in range(0, count, CHECKED_AT_ONCE):
        piece = out[start : start + CHECKED_AT_ONCE]
        places = torch.arange(start, start + len(piece), device=device).remainder_(PERIOD)
        wrong += int((piece != of_x * places + of_y * (places + 1)).sum())
    return Measured((3.0 if of_y else 2.0) * out.nbytes, time, wrong, count)


def product(product: Product, device, dtype, calls: int) -> Measured:
    """Measure a product with operands of `dtype` laid out as training has them: the experts' by the operators of
    hip_ops, others by hipBLASLt or cuBLAS through torch.

    It is timed with Gaussian numbers. The check takes operands u_i s_k and s_k w_j of small integers with signs s, whose
    product k u_i w_j is exact in fp32 in every order of summation; half precision may round parts of it.
    """
    import torch

    left, right, call = operands(product, device, dtype)
    left.normal_()
    right.normal_()
    time = seconds(call, device, calls)
    rows, inner, columns = (torch.arange(size, device=device) for size in (product.m, product.k, product.n))
    u, signs, w = rows % 3 + 1.0, 1.0 - 2.0 * (inner % 3 == 0), columns % 5 + 1.0
    left.copy_(u[:, None] * signs)
    right.copy_(signs[:, None] * w)
    call().zero_()  # a weight gradient adds to what there is
    result, wrong = call().view(product.batch, product.m, product.n), 0
    tolerance = 2.0**-7 if dtype.itemsize == 2 else 2.0**-20
    at_once = max(1, CHECKED_AT_ONCE // (product.batch * product.n))
    for start in range(0, product.m, at_once):
        expected = product.k * u[start : start + at_once, None] * w
        near = (result[:, start : start + at_once].float() - expected).abs() <= tolerance * expected
        wrong += int((~near).sum())
    return Measured(product.flops, time, wrong, result.numel())


def operands(product: Product, device, dtype):
    """Return both operands [batch, m, k] and [batch, k, n] of a product, and the call that returns its result, whose
    memory is the same in every call but for the experts' rows.
    """
    import torch

    import hip_ops
    from hip_ops.runtime.main_grad import add_product_

    batch, m, n, k = product.batch, product.m, product.n, product.k
    of_weight = product.direction == "wgrad"

    def matrices(rows: int, columns: int, transposed: bool):
        shape = (batch, columns, rows) if transposed else (batch, rows, columns)
        matrix = torch.empty(shape, device=device, dtype=dtype)
        return matrix.mT if transposed else matrix

    left, right = matrices(m, k, of_weight), matrices(k, n, product.direction == "forward")
    out = torch.zeros(batch, m, n, device=device, dtype=torch.float32 if of_weight else dtype)
    if product.part == "experts":
        rows = k if of_weight else m
        ends = torch.arange(rows, batch * rows + 1, rows, device=device, dtype=torch.int32)
        if of_weight:
            a, b = left.mT.flatten(0, 1), right.flatten(0, 1)
            return left, right, lambda: hip_ops.grouped_outer_(out, a, b, ends, True)
        x = left.flatten(0, 1)
        return left, right, lambda: hip_ops.grouped_rows(x, right, ends)
    if of_weight:
        return left, right, lambda: add_product_(out[0], left[0].t(), right[0])
    if batch > 1:
        return left, right, lambda: torch.bmm(left, right, out=out)
    return left, right, lambda: torch.mm(left[0], right[0], out=out[0])


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
        return timeit.repeat(call, number=1, repeat=calls)
    with torch.cuda.device(device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(calls + 1)]
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1e3 for a, b in zip(events, events[1:], strict=False)]
