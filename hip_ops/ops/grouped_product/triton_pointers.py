# SPDX-License-Identifier: Apache-2.0
"""The products of triton.py with plain loads and stores, for MI300X, for NVIDIA GPUs before Hopper, and for operands
that no descriptor can read. On AMD consecutive tiles go to one XCD (hip_ops/ops/newton_schulz/tile_order.h explains
why)."""

from __future__ import annotations

import triton
import triton.language as tl

from hip_ops.ops.grouped_product.expert_tiles import expert_borders, find_expert, outer_tiles
from hip_ops.runtime.tiles import grouped_tile, xcd_contiguous


@triton.jit
def grouped_pointer_rows_kernel(
    x_pointer, w_pointer, out_pointer, offsets, experts, n, k, x_stride, w_matrix, w_stride,
    TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, XCDS: tl.constexpr,
):
    """As grouped_rows_kernel; strides are those of stored rows, w_matrix the distance of matrices."""
    starts, ends = expert_borders(offsets, experts, EXPERTS)
    tile_columns = tl.cdiv(n, BLOCK_N)
    tile_ends = tl.cumsum(tl.cdiv(ends - starts, BLOCK_M) * tile_columns)
    tiles = tl.max(tile_ends)
    for walked in range(tl.program_id(0), tiles, tl.num_programs(0)):
        expert, start, end, place = find_expert(xcd_contiguous(walked, tiles, XCDS), starts, ends, tile_ends)
        row, column = grouped_tile(place, tl.cdiv(end - start, BLOCK_M), tile_columns, GROUP)
        rows = start + row * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        # Rows and columns past the end read the last one; their results are not stored.
        x_at = x_pointer + tl.minimum(rows, end - 1).to(tl.int64)[:, None] * x_stride
        w_at = w_pointer + expert.to(tl.int64) * w_matrix
        w_columns = (columns % n)[None, :]
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for begin in range(0, k, BLOCK_K):
            at = begin + depth
            w_offsets = w_columns * w_stride + at[:, None] if TRANSPOSED else at[:, None] * w_stride + w_columns
            if EVEN_K:
                x = tl.load(x_at + at[None, :])
                w = tl.load(w_at + w_offsets)
            else:
                x = tl.load(x_at + at[None, :], mask=at[None, :] < k, other=0.0)
                w = tl.load(w_at + w_offsets, mask=at[:, None] < k, other=0.0)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        out_at = out_pointer + rows.to(tl.int64)[:, None] * n + columns[None, :]
        tl.store(out_at, acc.to(out_pointer.dtype.element_ty), mask=(rows < end)[:, None] & (columns < n)[None, :])


@triton.jit
def grouped_pointer_outer_kernel(
    a_pointer, b_pointer, out_pointer, offsets, experts, m, n, a_stride, b_stride, out_matrix, out_stride,
    ACCUMULATE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, GROUP: tl.constexpr, XCDS: tl.constexpr,
):
    """As grouped_outer_kernel."""
    starts, ends = expert_borders(offsets, experts, EXPERTS)
    tile_rows, tile_columns = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tile_ends = tl.cumsum(outer_tiles(starts, ends, experts, tile_rows * tile_columns, ACCUMULATE, EXPERTS))
    tiles = tl.max(tile_ends)
    for walked in range(tl.program_id(0), tiles, tl.num_programs(0)):
        expert, start, end, place = find_expert(xcd_contiguous(walked, tiles, XCDS), starts, ends, tile_ends)
        row, column = grouped_tile(place, tile_rows, tile_columns, GROUP)
        rows = row * BLOCK_M + tl.arange(0, BLOCK_M)
        columns = column * BLOCK_N + tl.arange(0, BLOCK_N)
        depth = tl.arange(0, BLOCK_K)
        # A is loaded as [m, k]: the AMD compiler transposes it on its way to shared memory. As [k, m] and transposed
        # afterwards it is read from there two bytes at a time.
        a_offsets = (rows % m)[:, None] + depth[None, :] * a_stride
        b_offsets = (columns % n)[None, :] + depth[:, None] * b_stride
        a_at = a_pointer + start.to(tl.int64) * a_stride
        b_at = b_pointer + start.to(tl.int64) * b_stride
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for left in range(end - start, 0, -BLOCK_K):
            a = tl.load(a_at + a_offsets, mask=(depth < left)[None, :], other=0.0)
            b = tl.load(b_at + b_offsets, mask=(depth < left)[:, None], other=0.0)
            acc = tl.dot(a, b, acc, input_precision="ieee")
            a_at += BLOCK_K * a_stride
            b_at += BLOCK_K * b_stride
        out_at = out_pointer + expert.to(tl.int64) * out_matrix
        out_at += rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
        stored = (rows < m)[:, None] & (columns < n)[None, :]
        if ACCUMULATE:
            acc += tl.load(out_at, mask=stored, other=0.0).to(tl.float32)
        tl.store(out_at, acc.to(out_pointer.dtype.element_ty), mask=stored)
