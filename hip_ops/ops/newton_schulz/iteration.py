# SPDX-License-Identifier: Apache-2.0
"""The Newton-Schulz iteration as a sequence of products, the same for every version.

A version has a subclass of `Products`, which keeps X in the layout that its kernels read best. All tensors are batched;
n is the small side of the matrices, m the large one. X is [batch, n, m] in the formulas, even if the caller's matrices
are tall.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hip_ops.ops.newton_schulz.plan import Plan
from hip_ops.runtime.launch import wide


class Products:
    """The four products of an iteration, which each version implements.

    tall: whether the caller's matrices have more rows than columns. dtype: of the caller's matrices.
    """

    def __init__(self, tall: bool, dtype: torch.dtype):
        self.tall, self.dtype = tall, dtype

    def gram(self, x: Any, alpha: float) -> Tensor:
        """alpha X X^T, [batch, n, n]."""

    def symmetric(self, a: Tensor, b: Tensor, d: Tensor | None, alpha: float, beta: float) -> Tensor:
        """alpha a b + beta d for symmetric, commuting a and b and symmetric d, all [batch, n, n]."""

    def apply(self, z: Tensor, x: Any, alpha: float, beta: float) -> Any:
        """alpha z X + beta X for symmetric z, in the layout of X."""

    def apply_last(self, z: Tensor, x: Any, alpha: float, beta: float) -> Tensor:
        """As `apply`, in the caller's shape, layout and dtype."""


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
    """out = scale * x / max(|x|_F, eps), x [batch, r, c] of any strides. It takes two kernels and no intermediate of x's
    size.
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
