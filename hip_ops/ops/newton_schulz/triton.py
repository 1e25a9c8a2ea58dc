# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz and its products on the kernel of triton_product.py. X stays in the caller's orientation: Gram matrices
of tall matrices read it by columns, and Z X = (X^T Z)^T since Z is symmetric."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from hip_ops.ops.newton_schulz.plan import Plan
from hip_ops.ops.newton_schulz.product_configs import ProductConfig, choose_config
from hip_ops.ops.newton_schulz.reference import ProductsInOrientation, iterate, normalised
from hip_ops.ops.newton_schulz.triton_product import AMD, empty_rows, product
from hip_ops.runtime.launch import on

NORMALISE_BLOCK, NORMALISE_WARPS = 4096, 8
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def normalise_kernel(x, square_sums, out, numel, blocks, scale, eps, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Compute out = x * (scale / max(sqrt(square_sums), eps)) of matrices of `numel` elements, `blocks` programs a
    matrix.
    """
    matrix = (tl.program_id(0) // blocks).to(tl.int64)
    offsets = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < numel
    norm = tl.sqrt_rn(tl.load(square_sums + matrix))
    factor = tl.div_rn(scale, tl.where(norm < eps, eps, norm))  # a select, which keeps NaN
    value = tl.load(x + matrix * numel + offsets, mask=mask, eviction_policy="evict_first").to(tl.float32)
    tl.store(out + matrix * numel + offsets, (value * factor).to(DTYPE), mask=mask)


def start_of(x: Tensor, square_sums: Tensor | None, eps: float, scale: float, out: Tensor) -> Tensor:
    """Compute `normalised` with the same bits, in wide accesses where sums are given and tensors are contiguous.

    torch multiplies by one number per matrix into another dtype element by element, at a third of the memory's rate.
    """
    plain = square_sums is None or square_sums.dtype != torch.float32 or x.dtype not in TYPES or out.dtype not in TYPES
    if plain or not (x.is_contiguous() and out.is_contiguous() and square_sums.is_contiguous()):
        return normalised(x, square_sums, eps, scale, out)
    numel = x[0].numel()
    blocks = triton.cdiv(numel, NORMALISE_BLOCK)
    normalise_kernel[(len(x) * blocks,)](
        x, square_sums, out, numel, blocks, scale, eps, TYPES[out.dtype], BLOCK=NORMALISE_BLOCK,
        num_warps=NORMALISE_WARPS
    )
    return out


class TritonProducts(ProductsInOrientation):
    def __init__(self, batch: int, n: int, m: int, tall: bool, dtype: torch.dtype):
        super().__init__(tall, dtype)
        self.configs = {kind: choose_config(kind, batch, n, m, AMD) for kind in ("gram", "square", "update")}

    def _symmetric(self, a: Tensor, b: Tensor, d: Tensor | None, alpha: float, beta: float, kind: str) -> Tensor:
        c, config = empty_rows(a.shape[0], a.shape[1], a.shape[1], like=a), self.configs[kind]
        if config.engine == "cublas":
            return torch.baddbmm(c if d is None else d, a, b.mT, beta=beta, alpha=alpha, out=c)
        return product(a, b, d, c, alpha, beta, True, config)

    def _apply(self, z: Tensor, x: Tensor, alpha: float, beta: float, dtype: torch.dtype) -> Tensor:
        config = self.configs["update"]
        left, right = (x, z) if self.tall else (z, x)
        c = empty_rows(*x.shape, like=x, dtype=dtype)
        if config.engine == "cublas" and dtype == x.dtype:
            return torch.baddbmm(x, left, right, beta=beta, alpha=alpha, out=c)
        if config.engine == "cublas":
            config = ProductConfig()
        if dtype.itemsize == 4:  # fp32 results take twice the shared memory
            config = replace(config, num_stages=2)
        return product(left, right.mT, x if beta else None, c, alpha, beta, False, config)


def newton_schulz(
    x: Tensor, square_sums: Tensor | None, coefficients: Sequence[float], form: str, restarts: Sequence[int],
    dtype: torch.dtype | None, eps: float,
) -> Tensor:
    """As reference.newton_schulz; dtype None is fp16."""
    plan = Plan.of(coefficients, form, restarts, dtype)
    batch, rows, columns = x.shape
    with on(x.device):
        start = start_of(
            x, square_sums, eps, plan.scales[0], empty_rows(batch, rows, columns, like=x, dtype=plan.dtype)
        )
        products = TritonProducts(batch, min(rows, columns), max(rows, columns), rows > columns, x.dtype)
        return iterate(products, start, plan)
