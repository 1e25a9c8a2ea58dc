# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz in plain torch: the definition that the kernels are compared with, and the iteration as a sequence of
products, which is the same for every version.

A version has a subclass of `Products`, which keeps X in the layout that its kernels read best. All tensors are batched;
n is the small side of the matrices, m the large one. X is [batch, n, m] in the formulas, even if the caller's matrices
are tall.

In fp32 and the standard form a 2-D matrix gives the bits of emerging_optimizers 0.3.0's `newton_schulz`: the same torch
functions are called in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hip_ops.ops.newton_schulz.plan import HALF_TYPES, Plan
from hip_ops.runtime.launch import wide


class Products:
    """The four products of an iteration, which each version implements.

    tall: whether the caller's matrices have more rows than columns. dtype: of the caller's matrices.
    """

    def __init__(self, tall: bool, dtype: torch.dtype):
        self.tall, self.dtype = tall, dtype

    def gram(self, x: Any, alpha: float) -> Tensor:
        """Return alpha X X^T, [batch, n, n]."""

    def symmetric(self, a: Tensor, b: Tensor, d: Tensor | None, alpha: float, beta: float) -> Tensor:
        """Return alpha a b + beta d for symmetric, commuting a and b and symmetric d, all [batch, n, n]."""

    def apply(self, z: Tensor, x: Any, alpha: float, beta: float) -> Any:
        """Return alpha z X + beta X for symmetric z, in the layout of X."""

    def apply_last(self, z: Tensor, x: Any, alpha: float, beta: float) -> Tensor:
        """Return `apply` in the caller's shape, layout and dtype."""


class ProductsInOrientation(Products):
    """Keeps X in the caller's orientation: [batch, n, m], or [batch, m, n] for tall matrices.

    A subclass has `_symmetric(a, b, d, alpha, beta, kind)` with kind "gram" or "square", and `_apply(z, x, alpha, beta,
    dtype)`.
    """

    def gram(self, x: Tensor, alpha: float) -> Tensor:
        rows = x.mT if self.tall else x
        return self._symmetric(rows, rows, None, alpha, 0.0, "gram")

    def symmetric(self, a: Tensor, b: Tensor, d: Tensor | None, alpha: float, beta: float) -> Tensor:
        return self._symmetric(a, b, d, alpha, beta, "square")

    def apply(self, z: Tensor, x: Tensor, alpha: float, beta: float) -> Tensor:
        return self._apply(z, x, alpha, beta, x.dtype)

    def apply_last(self, z: Tensor, x: Tensor, alpha: float, beta: float) -> Tensor:
        return self._apply(z, x, alpha, beta, self.dtype).contiguous()


def norms(x: Tensor, square_sums: Tensor | None) -> Tensor:
    """Return |x|_F, [batch, 1, 1], in fp32 (fp64 for fp64)."""
    if square_sums is None:
        return torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide(x.dtype))
    return square_sums.to(wide(x.dtype)).sqrt()[:, None, None]


def normalised(x: Tensor, square_sums: Tensor | None, eps: float, scale: float, out: Tensor) -> Tensor:
    """Compute out = scale * x / max(|x|_F, eps), x [batch, r, c] of any strides, in two kernels and without an
    intermediate of x's size.
    """
    floored = norms(x, square_sums).clamp_min(eps)
    if scale == 1.0 and out.dtype == floored.dtype:
        return torch.div(x, floored, out=out)
    return torch.mul(x, scale / floored, out=out)


def _first_factor(z: Tensor, q_scale: float, r_scale: float, a: float) -> Tensor:
    """Return Q = P = a I + Z, the first step from Q = I."""
    q = z * (q_scale / r_scale)
    q.diagonal(dim1=-2, dim2=-1).add_(a * q_scale)
    return q


def iterate(products: Products, x: Any, plan: Plan) -> Tensor:
    """Run all steps of `plan`, at least one. x: X, normalised and multiplied by plan.scales[0]."""
    x_scale, r_scale, q_scale = plan.scales
    gram_alpha = r_scale / (x_scale * x_scale)
    r = products.gram(x, gram_alpha)
    last = len(plan.triples) - 1
    q = None
    for step, (a, b, c) in enumerate(plan.triples):
        if step in plan.restarts:
            x = products.apply(q, x, 1 / q_scale, 0.0)
            r, q = products.gram(x, gram_alpha), None
        z = products.symmetric(r, r, r, c / r_scale, b)  # b R + c R^2
        if plan.form == "standard":
            if step == last:
                return products.apply_last(z, x, 1 / (r_scale * x_scale), a / x_scale)
            x = products.apply(z, x, 1 / r_scale, a)
            r = products.gram(x, gram_alpha)
            continue
        if q is None:
            q = _first_factor(z, q_scale, r_scale, a)
        else:
            q = products.symmetric(q, z, q, 1 / r_scale, a)  # Q P
        if step != last and step + 1 not in plan.restarts:
            r_p = products.symmetric(r, z, r, 1 / r_scale, a)
            r = products.symmetric(r_p, z, r_p, 1 / r_scale, a)  # P R P
    return products.apply_last(q, x, 1 / (q_scale * x_scale), 0.0)


def _product(a: Tensor, b: Tensor, d: Tensor | None, alpha: float, beta: float) -> Tensor:
    """Return alpha a b + beta d with one rounding. On the CPU 16-bit operands are widened, because its 16-bit products
    may round partial sums.
    """
    if a.device.type == "cpu" and a.dtype in HALF_TYPES:
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
