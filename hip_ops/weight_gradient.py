# SPDX-License-Identifier: Apache-2.0
"""Matrix products of half precision that give fp32: weight gradients summed by the product that makes them, and products yet to be scaled."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

logger = logging.getLogger("hip_ops")


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """total += a^T b in place. a [T, m] and b [T, n] of one dtype; total [m, n] of that dtype, or fp32, where nothing is rounded before the sum."""
    if total.dtype == a.dtype:
        return total.addmm_(a.t(), b)
    how = fp32_product(a.device, a.dtype) if a.is_cuda and total.dtype == torch.float32 else None
    if how == "addmm":
        return torch.ops.aten.addmm.dtype_out(total, a.t(), b, torch.float32, out=total)
    if how == "mm":
        return total.add_(torch.ops.aten.mm.dtype(a.t(), b, torch.float32))
    return total.addmm_(a.t().to(total.dtype), b.to(total.dtype))


def scaled_product(a: Tensor, b: Tensor, factors: Tensor, out: Tensor) -> Tensor:
    """out = factors * (a b), rounded once where the device multiplies into fp32. a [T, m], b [m, n] and out [T, n] of one dtype, factors [T, 1]."""
    if a.is_cuda and a.dtype != torch.float32 and fp32_product(a.device, a.dtype):
        return torch.mul(torch.ops.aten.mm.dtype(a, b, torch.float32), factors, out=out)
    if a.dtype == torch.bfloat16 and not a.is_cuda:
        return torch.mul(a.float() @ b.float(), factors, out=out)
    return torch.mm(a, b, out=out).mul_(factors)


@functools.cache
def fp32_product(device: torch.device, dtype: torch.dtype) -> str | None:
    """How `device` multiplies matrices of `dtype` into fp32: "addmm" also adds in place, "mm" only makes a product, None not at all.

    Tried once on small numbers and announced. Raises RuntimeError during the capture of a graph, where nothing can be tried.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "hip_ops: the first product into fp32 came while a graph is captured; run it once before the capture"
        )
    a = (torch.arange(32, device=device).reshape(4, 8) / 32).to(dtype)
    wanted = a.double().t() @ a.double() + 1 / 1024  # exact in fp32 and not in bf16
    ways = {
        "addmm": lambda: torch.ops.aten.addmm.dtype_out(total, a.t(), a, torch.float32, out=total),
        "mm": lambda: torch.ops.aten.mm.dtype(a.t(), a, torch.float32) + 1 / 1024,
    }
    failed = []
    for how, run in ways.items():
        total = torch.full((8, 8), 1 / 1024, device=device)
        try:
            right = torch.equal(run().double(), wanted) and torch.equal(ways["mm"]().double(), wanted)
        except (AttributeError, RuntimeError, TypeError) as error:  # a torch or a device without it
            failed.append(f"{how}: {str(error).splitlines()[0]}")
            continue
        if right:
            logger.info(
                "hip_ops: products of %s on %s come in fp32, weight gradients are summed by %s with out_dtype",
                dtype,
                device,
                how,
            )
            return how
        failed.append(f"{how}: wrong numbers")
    logger.warning(
        "hip_ops: weight gradients of %s on %s are summed in fp32 by products in fp32, slow; %s",
        dtype,
        device,
        "; ".join(failed),
    )
    return None
