# SPDX-License-Identifier: Apache-2.0
"""The product of triton_product.py with plain loads and stores, for MI300X and for NVIDIA GPUs before Hopper, which
have no descriptors in hardware. One program per tile; on AMD consecutive tiles go to one XCD
(hip_ops/ops/newton_schulz/tile_order.h explains why)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from hip_ops.ops.newton_schulz.product_configs import ProductConfig
from hip_ops.runtime.compute_units import tile_count
from hip_ops.runtime.tiles import XCDS, grouped_tile, triangle_tile, xcd_contiguous


@triton.jit
def pointer_product_kernel(
    a_pointer, b_pointer, d_pointer, c_pointer, m, n, k, a_stride, b_stride, d_stride, c_stride, a_batch, b_batch,
    d_batch, c_batch, alpha, beta,
    SYMMETRIC: tl.constexpr, A_BY_COLUMNS: tl.constexpr, B_BY_COLUMNS: tl.constexpr, HAS_D: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    XCDS: tl.constexpr,
):
    """Operands as in `symmetric_product_kernel`; strides are those of rows, or of columns where an operand lies by
    columns.
    """
    tile_rows = tl.cdiv(m, BLOCK_M)
    tile_columns = tl.cdiv(n, BLOCK_N)
    if SYMMETRIC:
        tiles = tile_rows * (tile_rows + 1) // 2
    else:
        tiles = tile_rows * tile_columns
    position = xcd_contiguous(tl.program_id(0), tl.num_programs(0), XCDS)
    matrix = (position // tiles).to(tl.int64)
    if SYMMETRIC:
        row, column = triangle_tile(position % tiles, BLOCK_M, BLOCK_N)
    else:
        row, column = grouped_tile(position % tiles, tile_rows, tile_columns, GROUP)
    rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # Rows past the end read another row; their results are not stored.
    a_rows = (rows % m)[:, None]
    b_rows = (columns % n)[None, :]
    a_at = a_pointer + matrix * a_batch
    b_at = b_pointer + matrix * b_batch
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        at = start + depth
        a_offsets = at[None, :] * a_stride + a_rows if A_BY_COLUMNS else a_rows * a_stride + at[None, :]
        b_offsets = at[:, None] * b_stride + b_rows if B_BY_COLUMNS else b_rows * b_stride + at[:, None]
        if EVEN_K:
            a = tl.load(a_at + a_offsets)
            b = tl.load(b_at + b_offsets)
        else:
            a = tl.load(a_at + a_offsets, mask=at[None, :] < k, other=0.0)
            b = tl.load(b_at + b_offsets, mask=at[:, None] < k, other=0.0)
        acc = tl.dot(a, b, acc)
    acc = acc * alpha
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    if HAS_D:
        d = tl.load(d_pointer + matrix * d_batch + rows[:, None] * d_stride + columns[None, :], mask=inside, other=0.0)
        acc += beta * d.to(tl.float32)
    result = acc.to(c_pointer.dtype.element_ty)
    c_at = c_pointer + matrix * c_batch
    tl.store(c_at + rows[:, None] * c_stride + columns[None, :], result, mask=inside)
    if SYMMETRIC:
        if row != column:
            mirrored = (columns[:, None] < n) & (rows[None, :] < m)
            tl.store(c_at + columns[:, None] * c_stride + rows[None, :], result.T, mask=mirrored)


def launch(
    a: Tensor, a_by_columns: bool, b: Tensor, b_by_columns: bool, d: Tensor | None, c: Tensor, k: int, alpha: float,
    beta: float, symmetric: bool, config: ProductConfig,
) -> None:
    batch, m, n = c.shape
    block_m, block_n = config.block_m, config.block_n
    if symmetric:
        block_m = block_n = min(block_m, block_n)
    programs = batch * tile_count(symmetric, m, n, block_m, block_n)
    pointer_product_kernel[(programs,)](
        a, b, d, c, m, n, k, a.stride(1), b.stride(1), 0 if d is None else d.stride(1), c.stride(1),
        a.stride(0), b.stride(0), 0 if d is None else d.stride(0), c.stride(0), alpha, beta,
        SYMMETRIC=symmetric, A_BY_COLUMNS=a_by_columns, B_BY_COLUMNS=b_by_columns, HAS_D=d is not None,
        EVEN_K=k % config.block_k == 0, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=config.block_k, GROUP=8, XCDS=XCDS,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )
