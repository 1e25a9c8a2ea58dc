# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz in plain torch: the definition that the kernels are compared with.

In fp32 and the standard form a 2-D matrix gives the bits of emerging_optimizers 0.3.0's `newton_schulz`: the same torch
functions are called in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hip_ops.ops.newton_schulz.iteration import Products, iterate, normalised
from hip_ops.ops.newton_schulz.plan import Plan
from hip_ops.runtime.launch import wide


def _product(a: Tensor, b: Tensor, d: Tensor | None, alpha: float, beta: float) -> Tensor:
    """alpha a b + beta d with one rounding. On the CPU 16-bit operands are widened, because its 16-bit products may
    round partial sums.
    """
    if a.device.type == "cpu" and a.dtype in (torch.bfloat16, torch.float16):
        return _product(a.float(), b.float(), None if d is None else d.float(), alpha, beta).to(a.dtype)
    if d is None or beta == 0.0:
        if alpha == 1.0 or a.dtype.itemsize >= 4:
            product = a @ b
            return product if alpha == 1.0 else product.mul_(alpha)
        return torch.baddbmm(a.new_empty((*a.shape[:2], b.shape[2])), a, b, beta=0.0, alpha=alpha)
    if a.shape[0] == 1:
        return torch.addmm(d[0], a[0], b[0], beta=beta, alpha=alpha)[None]
    return torch.baddbmm(d, a, b, beta=beta, alpha=alpha)


class TorchProducts(Products):
    """X is kept as [batch, n, m], a transposed view where the caller's matrices are tall."""

    def gram(self, x: Tensor, alpha: float) -> Tensor:
        return _product(x, x.mT, None, alpha, 0.0)

    def symmetric(self, a: Tensor, b: Tensor, d: Tensor | None, alpha: float, beta: float) -> Tensor:
        return _product(a, b, d, alpha, beta)

    def apply(self, z: Tensor, x: Tensor, alpha: float, beta: float) -> Tensor:
        return _product(z, x, x, alpha, beta)

    def apply_last(self, z: Tensor, x: Tensor, alpha: float, beta: float) -> Tensor:
        if self.dtype.itemsize > x.dtype.itemsize:  # 16-bit X, fp32 result: the only rounding is to the caller's dtype
            result = _product(z.to(self.dtype), x.to(self.dtype), x.to(self.dtype), alpha, beta)
        elif x.dtype == torch.float16:  # the result is not scaled, and half precision has more digits above 2^-14
            scale = 2.0**8
            result = _product(z, x, x, alpha * scale, beta * scale).to(torch.float32) / scale
        else:
            result = _product(z, x, x, alpha, beta)
        return (result.mT if self.tall else result).contiguous().to(self.dtype)


def newton_schulz(
    x: Tensor,
    square_sums: Tensor | None,
    coefficients: Sequence[float],
    form: str,
    restarts: Sequence[int],
    dtype: torch.dtype | None,
    eps: float,
) -> Tensor:
    """Run the iteration on x [batch, r, c] of any strides, with the arguments of `Plan.of`; without steps it
    normalises x.

    dtype None: fp32 on a CPU, fp16 on a GPU, fp64 for fp64.
    """
    half = x.is_cuda and x.dtype != torch.float64
    dtype = dtype or (torch.float16 if half else wide(x.dtype))
    plan = Plan.of(coefficients, form, restarts, dtype)
    if not plan.triples:
        return normalised(x, square_sums, eps, 1.0, torch.empty(x.shape, dtype=x.dtype, device=x.device))
    tall = x.shape[-2] > x.shape[-1]
    x_wide = x.mT if tall else x
    start = normalised(x_wide, square_sums, eps, plan.scales[0], torch.empty_like(x_wide, dtype=plan.dtype))
    return iterate(TorchProducts(tall, x.dtype), start, plan)
