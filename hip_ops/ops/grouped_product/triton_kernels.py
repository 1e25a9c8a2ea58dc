# SPDX-License-Identifier: Apache-2.0
"""Grouped products in Triton: x W_e^T, x W_e, and a_e^T b_e added to fp32 blocks.

A persistent grid loops over the tiles of all experts; the device counts the tiles of each expert. Operands and results
use tensor descriptors (TMA on Hopper). The next expert's rows follow an expert's last rows, which do not fill a tile.
So results, and operands of a_e^T b_e, use descriptors that end at the expert's end (`ragged_rows`). Sums are added to
`out` by the memory system, each number once: `out` is not read, and the bits are the same every time.

The pointer kernels compute the same products with plain loads and stores, for MI300X, for NVIDIA GPUs before Hopper,
and for operands that no descriptor can read. On AMD consecutive tiles go to one XCD
(hip_ops/ops/newton_schulz/tile_order.h explains why).
"""

import triton
import triton.language as tl

from hip_ops.ops.grouped_product.expert_tiles import expert_borders, find_expert, load_rows, outer_tiles, store_rows
from hip_ops.runtime.tiles import grouped_tile, xcd_contiguous


@triton.jit
def grouped_rows_kernel(
    x_desc, w_desc, out_desc, offsets, experts, n, k,
    TRANSPOSED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr,
):
    """Compute out[rows of e] = x[rows of e] W_e; W_e stored [k, n], or TRANSPOSED as [n, k]."""
    starts, ends = expert_borders(offsets, experts, EXPERTS)
    columns = tl.cdiv(n, BLOCK_N)
    tile_ends = tl.cumsum(tl.cdiv(ends - starts, BLOCK_M) * columns)
    tiles = tl.max(tile_ends)
    for position in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        expert, start, end, place = find_expert(position, starts, ends, tile_ends)
        row, column = grouped_tile(place, tl.cdiv(end - start, BLOCK_M), columns, GROUP)
        row0, column0 = row * BLOCK_M, column * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for at in range(0, k, BLOCK_K):
            # rows past the end belong to the next expert; their results are not stored
            x = x_desc.load([start + row0, at])
            if TRANSPOSED:
                w = w_desc.load([expert, column0, at]).reshape(BLOCK_N, BLOCK_K).T
            else:
                w = w_desc.load([expert, at, column0]).reshape(BLOCK_K, BLOCK_N)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        if PARTS == 2:
            left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
            store_rows(out_desc, start, end, row0, column0, left.to(out_desc.dtype), BLOCK_M, BLOCK_N // 2)
            store_rows(
                out_desc, start, end, row0, column0 + BLOCK_N // 2, right.to(out_desc.dtype), BLOCK_M, BLOCK_N // 2
            )
        else:
            store_rows(out_desc, start, end, row0, column0, acc.to(out_desc.dtype), BLOCK_M, BLOCK_N)


@triton.jit
def _leave(
    out_desc,
    expert,
    row0,
    column0,
    acc,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    REDUCE: tl.constexpr,
):
    """Store a tile in PARTS pieces, each of which needs shared memory only until it is stored."""
    if PARTS > 1:
        left, right = acc.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        _leave(out_desc, expert, row0, column0, left, ROWS, COLUMNS // 2, PARTS // 2, ACCUMULATE, REDUCE)
        _leave(
            out_desc, expert, row0, column0 + COLUMNS // 2, right, ROWS, COLUMNS // 2, PARTS // 2, ACCUMULATE, REDUCE
        )
    elif ACCUMULATE and REDUCE:
        out_desc.atomic_add([expert, row0, column0], acc.reshape(1, ROWS, COLUMNS))
    else:
        if ACCUMULATE:
            acc += out_desc.load([expert, row0, column0]).reshape(ROWS, COLUMNS).to(tl.float32)
        out_desc.store([expert, row0, column0], acc.to(out_desc.dtype).reshape(1, ROWS, COLUMNS))


@triton.jit
def grouped_outer_kernel(
    a_desc, b_desc, out_desc, offsets, experts, m, n,
    ACCUMULATE: tl.constexpr, REDUCE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
):
    """Compute out[e] (+)= a[rows of e]^T b[rows of e], [m, n]. An expert without rows is skipped, or, without
    ACCUMULATE, gets zeros.

    One loop over the steps of all tiles of a program: the next tile is loaded while this one's sums are stored.
    Triton's `flatten` requires inner loops of one length; in this kernel the length depends on the expert.
    """
    starts, ends = expert_borders(offsets, experts, EXPERTS)
    rows, columns = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tiles = outer_tiles(starts, ends, experts, rows * columns, ACCUMULATE, EXPERTS)
    tile_ends = tl.cumsum(tiles)
    first, programs = tl.program_id(0), tl.num_programs(0)
    mine = tl.cdiv(tl.maximum(tile_ends - first, 0), programs) - tl.cdiv(
        tl.maximum(tile_ends - tiles - first, 0), programs
    )
    total = tl.sum(mine * tl.maximum(tl.cdiv(ends - starts, BLOCK_K), 1))
    position, step, steps = first - programs, -1, 0
    expert, start, end, row0, column0 = 0, 0, 0, 0, 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, total):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            position += programs
            expert, start, end, place = find_expert(position, starts, ends, tile_ends)
            steps = tl.maximum(tl.cdiv(end - start, BLOCK_K), 1)
            row, column = grouped_tile(place, rows, columns, GROUP)
            row0, column0 = row * BLOCK_M, column * BLOCK_N
        a = load_rows(a_desc, start, end, step * BLOCK_K, row0, BLOCK_K, BLOCK_M)
        b = load_rows(b_desc, start, end, step * BLOCK_K, column0, BLOCK_K, BLOCK_N)
        acc = tl.dot(a.T, b, acc, input_precision="ieee")
        if step == steps - 1:
            _leave(out_desc, expert, row0, column0, acc, BLOCK_M, BLOCK_N, PARTS, ACCUMULATE, REDUCE)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)


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
