# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz in Triton, and its batched matrix products: the symmetric product, which computes only tiles on and
below the diagonal, and the general one. X stays in the caller's orientation: Gram matrices of tall matrices read it by
columns, and Z X = (X^T Z)^T since Z is symmetric.

One persistent kernel computes both; operands and results use tensor descriptors (TMA on Hopper). A second one without
descriptors is for MI300X and for NVIDIA GPUs before Hopper, which have none in hardware.

A program takes tiles `program_id, program_id + grid, ...` of batch x lower triangle in row order, so that the tiles in
flight belong to one or two matrices and share operand rows in L2. The mirror image of a tile is stored from the same
accumulators, transposed through shared memory. A tile on the diagonal is computed whole, and its mirror image is stored
past the end of the matrix, where the descriptor drops it. This needs no branch, so that the tile loop and the k loop
can be flattened into one pipelined loop. A A^T equals its transpose bit by bit because entries (i, j) and (j, i) sum
the same products in the same order.

Each operand is stored either by rows or by columns: Gram matrices of tall and of wide matrices need no transposed copy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from hip_ops.ops.newton_schulz.plan import Plan, tile_count
from hip_ops.ops.newton_schulz.product_configs import BEFORE_HOPPER_CONFIG, ProductConfig, choose_config
from hip_ops.ops.newton_schulz.reference import ProductsInOrientation, iterate, normalised
from hip_ops.runtime.descriptors import TensorDescriptor
from hip_ops.runtime.launch import XCDS, describable, multiprocessors, on
from hip_ops.runtime.tiles import grouped_tile, triangle_tile, xcd_contiguous

AMD = torch.version.hip is not None
NORMALISE_BLOCK, NORMALISE_WARPS = 4096, 8
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


@triton.jit
def _store_part(
    acc, d_desc, c_desc, mirror_desc, matrix, row0, column0, mirror_row0, alpha, beta,
    SYMMETRIC: tl.constexpr, HAS_D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):
    acc = acc * alpha
    if HAS_D:
        acc += beta * d_desc.load([matrix, row0, column0]).reshape(ROWS, COLUMNS).to(tl.float32)
    result = acc.to(c_desc.dtype)
    c_desc.store([matrix, row0, column0], result.reshape(1, ROWS, COLUMNS))
    if SYMMETRIC:
        mirror_desc.store([matrix, mirror_row0, row0], result.T.reshape(1, COLUMNS, ROWS))


@triton.jit
def symmetric_product_kernel(
    a_desc, b_desc, d_desc, c_desc, mirror_desc, batch, m, n, k, alpha, beta,
    SYMMETRIC: tl.constexpr, A_BY_COLUMNS: tl.constexpr, B_BY_COLUMNS: tl.constexpr, HAS_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    FLATTEN: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
):
    """Compute C = alpha A B^T + beta D. A [batch, m, k] is stored by rows, or by columns as [batch, k, m]; B [batch, n,
    k] likewise.
    """
    tile_rows = tl.cdiv(m, BLOCK_M)
    tile_columns = tl.cdiv(n, BLOCK_N)
    if SYMMETRIC:
        if BLOCK_M == BLOCK_N:
            tiles = tile_rows * (tile_rows + 1) // 2
        elif BLOCK_M > BLOCK_N:
            tiles = tile_rows * (tile_rows + 1)
        else:
            tiles = (tile_rows // 2 + tile_rows % 2) * (tile_rows // 2 + 1)
    else:
        tiles = tile_rows * tile_columns
    for position in tl.range(
        tl.program_id(0), batch * tiles, tl.num_programs(0), flatten=FLATTEN, warp_specialize=WARP_SPECIALIZE
    ):
        matrix = position // tiles
        if SYMMETRIC:
            row, column = triangle_tile(position % tiles, BLOCK_M, BLOCK_N)
        else:
            row, column = grouped_tile(position % tiles, tile_rows, tile_columns, GROUP)
        row0 = row * BLOCK_M
        column0 = column * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start in range(0, k, BLOCK_K):
            if A_BY_COLUMNS:
                a = a_desc.load([matrix, start, row0]).reshape(BLOCK_K, BLOCK_M).T
            else:
                a = a_desc.load([matrix, row0, start]).reshape(BLOCK_M, BLOCK_K)
            if B_BY_COLUMNS:
                b = b_desc.load([matrix, start, column0]).reshape(BLOCK_K, BLOCK_N)
            else:
                b = b_desc.load([matrix, column0, start]).reshape(BLOCK_N, BLOCK_K).T
            acc = tl.dot(a, b, acc)
        past_the_end = tile_rows * BLOCK_M + tile_columns * BLOCK_N
        mirror_row0 = tl.where(column0 + BLOCK_N <= row0, column0, past_the_end)
        if PARTS == 2:  # results in two halves, which leaves shared memory for one more stage of operands
            left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
            _store_part(left, d_desc, c_desc, mirror_desc, matrix, row0, column0, mirror_row0,
                        alpha, beta, SYMMETRIC, HAS_D, BLOCK_M, BLOCK_N // 2)
            _store_part(right, d_desc, c_desc, mirror_desc, matrix, row0, column0 + BLOCK_N // 2,
                        mirror_row0 + BLOCK_N // 2, alpha, beta, SYMMETRIC, HAS_D, BLOCK_M, BLOCK_N // 2)
        else:
            _store_part(acc, d_desc, c_desc, mirror_desc, matrix, row0, column0, mirror_row0,
                        alpha, beta, SYMMETRIC, HAS_D, BLOCK_M, BLOCK_N)


@triton.jit
def pointer_product_kernel(
    a_pointer, b_pointer, d_pointer, c_pointer, m, n, k, a_stride, b_stride, d_stride, c_stride, a_batch, b_batch,
    d_batch, c_batch, alpha, beta,
    SYMMETRIC: tl.constexpr, A_BY_COLUMNS: tl.constexpr, B_BY_COLUMNS: tl.constexpr, HAS_D: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    XCDS: tl.constexpr,
):
    """Compute the product with plain loads and stores, one program per tile; on AMD consecutive tiles go to one XCD
    (hip_ops/ops/newton_schulz/tile_order.h explains why). Operands as in `symmetric_product_kernel`; strides are those
    of rows, or of columns where an operand lies by columns.
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


@functools.cache
def _has_descriptors(device: torch.device) -> bool:
    return device.type == "cuda" and not AMD and torch.cuda.get_device_capability(device) >= (9, 0)


def empty_rows(batch: int, rows: int, columns: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate [batch, rows, columns] whose rows start at multiples of 16 bytes, as tensor descriptors require."""
    padded = -(-columns // 8) * 8
    return like.new_empty((batch, rows, padded), dtype=dtype or like.dtype)[..., :columns]


def stored(x: Tensor) -> tuple[Tensor, bool]:
    """Return [batch, r, c] in a layout that a descriptor can read, and whether it is stored by columns, as [batch, c,
    r].
    """
    if describable(x):
        return x, False
    if describable(x.mT):
        return x.mT, True
    copy = empty_rows(*x.shape, like=x)
    copy.copy_(x)
    return copy, False


def _launch_by_pointers(
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


def product(
    a: Tensor, b: Tensor, d: Tensor | None, c: Tensor, alpha: float, beta: float, symmetric: bool, config: ProductConfig
) -> Tensor:
    """Compute c = alpha a b^T + beta d, [batch, m, n], by rows. a [batch, m, k] and b [batch, n, k] may be stored by
    rows or by columns.

    symmetric: m = n and the result is symmetric; only tiles on and below the diagonal are computed. Return c.
    """
    batch, m, n = c.shape
    k = a.shape[-1]
    assert describable(c) and a.shape == (batch, m, k) and b.shape == (batch, n, k) and k > 0
    a_storage, a_by_columns = stored(a)
    b_storage, b_by_columns = (a_storage, a_by_columns) if b is a else stored(b)
    if d is not None:
        assert d.shape == c.shape
        d, by_columns = stored(d)
        if by_columns and not symmetric:  # a symmetric D is its own transpose
            d = empty_rows(batch, m, n, like=d).copy_(d.mT)
    if not _has_descriptors(c.device):
        config = config if AMD else BEFORE_HOPPER_CONFIG
        _launch_by_pointers(
            a_storage, a_by_columns, b_storage, b_by_columns, d, c, k, alpha, beta, symmetric, config
        )
        return c
    block_m, block_n, block_k = config.block_m, config.block_n, config.block_k
    width = block_n // config.parts
    a_block = [1, block_k, block_m] if a_by_columns else [1, block_m, block_k]
    b_block = [1, block_k, block_n] if b_by_columns else [1, block_n, block_k]
    programs = batch * tile_count(symmetric, m, n, block_m, block_n)
    if config.persistent:
        programs = min(programs, multiprocessors(c.device))
    symmetric_product_kernel[(programs,)](
        TensorDescriptor.from_tensor(a_storage, a_block),
        TensorDescriptor.from_tensor(b_storage, b_block),
        None if d is None else TensorDescriptor.from_tensor(d, [1, block_m, width]),
        TensorDescriptor.from_tensor(c, [1, block_m, width]),
        TensorDescriptor.from_tensor(c, [1, width, block_m]) if symmetric else None,
        batch, m, n, k, alpha, beta,
        SYMMETRIC=symmetric, A_BY_COLUMNS=a_by_columns, B_BY_COLUMNS=b_by_columns, HAS_D=d is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, PARTS=config.parts, GROUP=8,
        FLATTEN=config.flatten, WARP_SPECIALIZE=config.warp_specialize,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )
    return c


@triton.jit(do_not_specialize=["blocks"])
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
