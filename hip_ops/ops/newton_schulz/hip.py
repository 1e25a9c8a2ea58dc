# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz and its products on symmetric_product.hip and newton_schulz_start.hip.

The kernels read both operands by rows. X is therefore kept twice, as [batch, n, m] and as its transpose: the general
kernel computes X^T Z + a X^T and writes the transpose of its result in the same pass, and so does the start.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hip_ops.ops.newton_schulz.plan import HALF_TYPES, Plan, tile_side
from hip_ops.ops.newton_schulz.reference import Products, iterate, norms
from hip_ops.runtime.launch import architecture
from hip_ops.runtime.launchers import call

INPUT_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def _is_half(x: Tensor) -> int:
    return int(x.dtype == torch.float16)


def _symmetric(a: Tensor, b: Tensor, d: Tensor | None, alpha: float, beta: float, tile: int | None = None) -> Tensor:
    """Return alpha a b + beta d. tile: side of the kernel's tiles; by default `tile_side` chooses."""
    batch, n, k = a.shape
    tile = tile or tile_side(True, batch, n, n, architecture(a.device))
    c = a.new_empty((batch, n, n))
    call("ho_symmetric_product", a, b, d, c, batch, n, k, alpha, beta, 0.0, _is_half(a), tile, device=a.device)
    return c


def _general(
    a: Tensor, b_transposed: Tensor, d: Tensor | None, alpha: float, beta: float, transposed: Tensor | None = None,
    dtype: torch.dtype | None = None, tile: int | None = None,
) -> Tensor:
    """Return alpha a b + beta d from a [batch, m, k] and b's transpose [batch, n, k]; write the transpose to
    `transposed` if it is given.
    """
    (batch, m, k), n = a.shape, b_transposed.shape[1]
    tile = tile or tile_side(False, batch, m, n, architecture(a.device))
    c = a.new_empty((batch, m, n), dtype=dtype)
    to_bf16 = int(c.dtype == torch.bfloat16)
    call(
        "ho_general_product", a, b_transposed, d, c, transposed, batch, m, n, k, alpha, beta, _is_half(a), to_bf16,
        tile, device=a.device,
    )
    return c


def _start(
    x: Tensor, square_sums: Tensor | None, eps: float, scale: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return `normalised` in `dtype`, with the same bits, and its transpose, both contiguous."""
    batch, rows, columns = x.shape
    factors = scale / norms(x, square_sums).clamp_min(eps)
    start = torch.empty(x.shape, dtype=dtype, device=x.device)
    turned = start.new_empty((batch, columns, rows))
    call(
        "ho_newton_schulz_start", x.contiguous(), factors, start, turned, batch, rows, columns,
        INPUT_TYPES.index(x.dtype), _is_half(start), device=x.device,
    )
    return start, turned


class HipProducts(Products):
    """X is the pair ([batch, n, m], [batch, m, n]), both contiguous."""

    def gram(self, x: tuple[Tensor, Tensor], alpha: float) -> Tensor:
        return _symmetric(x[0], x[0], None, alpha, 0.0)

    def symmetric(self, a: Tensor, b: Tensor, d: Tensor | None, alpha: float, beta: float) -> Tensor:
        return _symmetric(a, b, d, alpha, beta)

    def apply(self, z: Tensor, x: tuple[Tensor, Tensor], alpha: float, beta: float) -> tuple[Tensor, Tensor]:
        wide, tall = x
        new_wide = torch.empty_like(wide)
        new_tall = _general(tall, z, tall if beta else None, alpha, beta, transposed=new_wide)
        return new_wide, new_tall

    def apply_last(self, z: Tensor, x: tuple[Tensor, Tensor], alpha: float, beta: float) -> Tensor:
        wide, tall = x
        keep = self.dtype if self.dtype in HALF_TYPES and wide.dtype == torch.float16 else wide.dtype
        scale = 1.0 if keep == torch.bfloat16 else 2.0**8  # half precision has its digits above 2^-14
        if self.tall:
            result = _general(tall, z, tall if beta else None, alpha * scale, beta * scale, dtype=keep)
        else:
            result = _general(z, tall, wide if beta else None, alpha * scale, beta * scale, dtype=keep)
        return (
            result.to(self.dtype)
            if scale == 1.0
            else torch.mul(result, 1 / scale, out=torch.empty_like(result, dtype=self.dtype))
        )


def newton_schulz(
    x: Tensor, square_sums: Tensor | None, coefficients: Sequence[float], form: str, restarts: Sequence[int],
    dtype: torch.dtype | None, eps: float,
) -> Tensor:
    """As reference.newton_schulz; dtype None is fp16."""
    plan = Plan.of(coefficients, form, restarts, dtype)
    start, turned = _start(x, square_sums, eps, plan.scales[0], plan.dtype)
    tall = x.shape[-2] > x.shape[-1]
    return iterate(HipProducts(tall, x.dtype), (turned, start) if tall else (start, turned), plan)
