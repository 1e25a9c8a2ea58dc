# SPDX-License-Identifier: Apache-2.0
"""Residual merge + RMSNorm or LayerNorm in Triton: one kernel forward, two backward (rows, then the sums over rows).
No atomics.

Same functions, roundings and saved tensors as reference.py. A program loops over rows of one tile [ROWS,
BLOCK] and keeps the vectors, and in the backward the sums over its rows, in registers; `launch` says how many programs
that is. Of RMSNorm, bias, mean and d_bias are None, which Triton leaves out of the compiled kernel. Importing this
module imports triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hip_ops.ops.rms_norm import backward_results, forward_results
from hip_ops.runtime.launch import Launch, as_rows, contiguous, multiprocessors, plan, run_kernel

TILE_NAMES = ("ROWS", "BLOCK", "STAGES")


@triton.jit
def _vectors(output_scale, residual_scale, output_bias, residual_bias, columns, inside):
    """Load the four vectors of ZAYA's merge in fp32."""
    s_o = tl.load(output_scale + columns, mask=inside, other=0.0).to(tl.float32)
    s_x = tl.load(residual_scale + columns, mask=inside, other=0.0).to(tl.float32)
    b_o = tl.load(output_bias + columns, mask=inside, other=0.0).to(tl.float32)
    b_x = tl.load(residual_bias + columns, mask=inside, other=0.0).to(tl.float32)
    return s_o, s_x, b_o, b_x


@triton.jit
def _rows(at, mask):
    """Load elements that are read once, in fp32."""
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def rms_norm_forward_kernel(
    x, residual, output_bias, output_scale, residual_bias, residual_scale, weight, bias, y, new_residual, mean, rstd,
    rows, hidden, x_stride, residual_stride, eps, SCALED: tl.constexpr, CENTERED: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):
    """Compute y, new_residual and the statistics of rows pid * ROWS + [0, ROWS), then of every num_programs * ROWS-th
    block of rows.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < hidden
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    if CENTERED:
        b = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        s_o, s_x, b_o, b_x = _vectors(output_scale, residual_scale, output_bias, residual_bias, columns, inside)
        shift = tl.fma(b_o, s_o, b_x * s_x)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        live = row < rows
        mask = live & inside
        a = _rows(x + row * x_stride + columns, mask)
        r = _rows(residual + row * residual_stride + columns, mask)
        if SCALED:
            merged = tl.fma(r, s_x, tl.fma(a, s_o, shift))
        else:
            merged = a + r
        stored = merged.to(new_residual.dtype.element_ty)
        tl.store(new_residual + row * hidden + columns, stored, mask=mask)
        value = stored.to(tl.float32)
        if CENTERED:
            center = tl.sum(value, axis=1, keep_dims=True) / hidden
            tl.store(mean + row, center, mask=live)
            value = tl.where(inside, value - center, 0.0)
        scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / hidden + eps)
        tl.store(rstd + row, scale, mask=live)
        if CENTERED:
            normed = tl.fma(value * scale, w, b)
        else:
            normed = value * scale * w
        tl.store(y + row * hidden + columns, normed.to(y.dtype.element_ty), mask=mask)


@triton.jit
def rms_norm_backward_kernel(
    dy, d_new_residual, x, residual, mean, rstd, output_bias, output_scale, residual_bias, residual_scale, weight, d_x,
    d_residual, partial, rows, hidden, dy_stride, d_new_residual_stride, x_stride, residual_stride,
    SCALED: tl.constexpr, CENTERED: tl.constexpr, HAS_D_NEW_RESIDUAL: tl.constexpr, WRITES_D_X: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):
    """Compute d_x and d_residual of the program's rows, and their sums in partial [programs, sums, hidden].

    Sums: g, g * x, g * residual (where SCALED), dy * normalized, dy (where CENTERED). Without SCALED, `residual` is
    new_residual and `x` unused.
    """
    columns = tl.arange(0, BLOCK)[None, :]
    inside = columns < hidden
    w = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    sum_w = tl.zeros([ROWS, BLOCK], tl.float32)
    if CENTERED:
        sum_b = tl.zeros([ROWS, BLOCK], tl.float32)
    if SCALED:
        s_o, s_x, b_o, b_x = _vectors(output_scale, residual_scale, output_bias, residual_bias, columns, inside)
        shift = tl.fma(b_o, s_o, b_x * s_x)
        sum_g = tl.zeros([ROWS, BLOCK], tl.float32)
        sum_gx = tl.zeros([ROWS, BLOCK], tl.float32)
        sum_gr = tl.zeros([ROWS, BLOCK], tl.float32)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (first + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        live = row < rows
        mask = live & inside
        upstream = _rows(dy + row * dy_stride + columns, mask)
        r = _rows(residual + row * residual_stride + columns, mask)
        if SCALED:
            a = _rows(x + row * x_stride + columns, mask)
        if HAS_D_NEW_RESIDUAL:
            passed = _rows(d_new_residual + row * d_new_residual_stride + columns, mask)
        scale = tl.load(rstd + row, mask=live, other=0.0)
        if SCALED:
            value = tl.fma(r, s_x, tl.fma(a, s_o, shift)).to(residual.dtype.element_ty).to(tl.float32)
        else:
            value = r
        if CENTERED:
            value -= tl.load(mean + row, mask=live, other=0.0)
        normalized = value * scale
        d_normalized = upstream * w
        projection = tl.sum(d_normalized * normalized, axis=1, keep_dims=True) / hidden
        if CENTERED:
            average = tl.sum(d_normalized, axis=1, keep_dims=True) / hidden
            g = (d_normalized - normalized * projection - average) * scale
            sum_b += upstream
        else:
            g = (d_normalized - normalized * projection) * scale
        if HAS_D_NEW_RESIDUAL:
            g += passed
        sum_w += upstream * normalized
        if SCALED:
            sum_g += g
            sum_gx += g * a
            sum_gr += g * r
            tl.store(d_x + row * hidden + columns, (g * s_o).to(d_x.dtype.element_ty), mask=mask)
            tl.store(d_residual + row * hidden + columns, (g * s_x).to(d_residual.dtype.element_ty), mask=mask)
        else:
            tl.store(d_residual + row * hidden + columns, g.to(d_residual.dtype.element_ty), mask=mask)
            if WRITES_D_X:
                tl.store(d_x + row * hidden + columns, g.to(d_x.dtype.element_ty), mask=mask)
    column = tl.arange(0, BLOCK)
    within = column < hidden
    OF_MERGE: tl.constexpr = 3 if SCALED else 0
    SUMS: tl.constexpr = OF_MERGE + (2 if CENTERED else 1)
    out = partial + tl.program_id(0).to(tl.int64) * SUMS * hidden + column
    if SCALED:
        tl.store(out, tl.sum(sum_g, axis=0), mask=within)
        tl.store(out + hidden, tl.sum(sum_gx, axis=0), mask=within)
        tl.store(out + 2 * hidden, tl.sum(sum_gr, axis=0), mask=within)
    tl.store(out + OF_MERGE * hidden, tl.sum(sum_w, axis=0), mask=within)
    if CENTERED:
        tl.store(out + (SUMS - 1) * hidden, tl.sum(sum_b, axis=0), mask=within)


@triton.jit(do_not_specialize=("programs",))
def rms_norm_sum_kernel(
    partial, output_bias, output_scale, residual_bias, residual_scale, d_output_bias, d_output_scale, d_residual_bias,
    d_residual_scale, d_weight, d_bias, programs, hidden, SCALED: tl.constexpr, CENTERED: tl.constexpr,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute the gradients of the vectors from partial [programs, sums, hidden], BLOCK columns per program."""
    OF_MERGE: tl.constexpr = 3 if SCALED else 0
    SUMS: tl.constexpr = OF_MERGE + (2 if CENTERED else 1)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < hidden
    sum_w = tl.zeros([PROGRAMS, BLOCK], tl.float32)
    if CENTERED:
        sum_b = tl.zeros([PROGRAMS, BLOCK], tl.float32)
    if SCALED:
        sum_g = tl.zeros([PROGRAMS, BLOCK], tl.float32)
        sum_gx = tl.zeros([PROGRAMS, BLOCK], tl.float32)
        sum_gr = tl.zeros([PROGRAMS, BLOCK], tl.float32)
    for first in range(0, programs, PROGRAMS):
        program = (first + tl.arange(0, PROGRAMS)[:, None]).to(tl.int64)
        mask = (program < programs) & inside[None, :]
        at = partial + program * SUMS * hidden + columns[None, :]
        sum_w += tl.load(at + OF_MERGE * hidden, mask=mask, other=0.0)
        if CENTERED:
            sum_b += tl.load(at + (SUMS - 1) * hidden, mask=mask, other=0.0)
        if SCALED:
            sum_g += tl.load(at, mask=mask, other=0.0)
            sum_gx += tl.load(at + hidden, mask=mask, other=0.0)
            sum_gr += tl.load(at + 2 * hidden, mask=mask, other=0.0)
    tl.store(d_weight + columns, tl.sum(sum_w, axis=0).to(d_weight.dtype.element_ty), mask=inside)
    if CENTERED:
        tl.store(d_bias + columns, tl.sum(sum_b, axis=0).to(d_weight.dtype.element_ty), mask=inside)
    if SCALED:
        total = tl.sum(sum_g, axis=0)
        s_o, s_x, b_o, b_x = _vectors(output_scale, residual_scale, output_bias, residual_bias, columns, inside)
        vector = d_weight.dtype.element_ty
        tl.store(d_output_bias + columns, (total * s_o).to(vector), mask=inside)
        tl.store(d_output_scale + columns, tl.fma(total, b_o, tl.sum(sum_gx, axis=0)).to(vector), mask=inside)
        tl.store(d_residual_bias + columns, (total * s_x).to(vector), mask=inside)
        tl.store(d_residual_scale + columns, tl.fma(total, b_x, tl.sum(sum_gr, axis=0)).to(vector), mask=inside)


def launch(hidden_size: int, *, scaled: bool, backward: bool, warp_size: int) -> Launch:
    """Choose tile and grid for a hidden size.

    Forward: one program per tile, because a program that loops could only keep the vectors, which the cache holds
    anyway (measured on an H100). On MI300X (not measured) ZAYA's form keeps its five vectors. Backward: as many
    programs as the registers allow, so that vectors are read and partial sums written once per program.
    """
    nvidia = warp_size == 32
    block = max(triton.next_power_of_2(hidden_size), 128)
    rows = max(1, 1024 // block)
    # Elements per lane. Where sums and vectors stay in registers, 16 bytes of ZAYA's fp32 stream: then neighbouring
    # lanes store neighbouring bytes (Triton would pass wider ones through shared memory first) and registers are left
    # for loads.
    per_lane = (16 if backward else 8) if not scaled else 16 if nvidia and not backward else 4
    num_warps = min(max(block * rows // (per_lane * warp_size), 128 // warp_size), 1024 // warp_size)
    if not backward and (nvidia or not scaled):
        return Launch(rows, block, num_warps)
    # Lanes of a multiprocessor: 65,536 registers over 128 and 64 a lane on an H100; an MI300X has twice as many a
    # compute unit.
    resident = (512 if backward else 1024) * (1 if nvidia else 2)
    if nvidia and backward and not scaled and block <= 2048:
        resident = 256  # measured: with three rows on the way, two programs of four warps do better than four
    # Loads of the next rows in flight; wider rows leave less room for them in registers and shared memory.
    stages = (
        1 if not backward or block > 8192 or num_warps * warp_size >= 1024 else 3 if nvidia and block <= 4096 else 2
    )
    return Launch(rows, block, num_warps, max(1, resident // (num_warps * warp_size)), stages)


def merge_norm(
    output: Tensor, residual: Tensor, output_bias: Tensor | None, output_scale: Tensor | None,
    residual_bias: Tensor | None, residual_scale: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
) -> tuple[Tensor, ...]:
    """As reference.merge_norm."""
    hidden, device, scaled, centered = output.shape[-1], output.device, output_scale is not None, bias is not None
    y, new_residual, mean, rstd = forward_results(output, residual, weight, bias)
    if output.numel():
        output, residual = as_rows(output), as_rows(residual)
        *vectors, weight, bias = contiguous(output_bias, output_scale, residual_bias, residual_scale, weight, bias)
        rows, processors = output.shape[0], multiprocessors(device)
        grid, keywords = plan(launch, TILE_NAMES, (rows,), hidden, scaled=scaled, backward=False, processors=processors)
        run_kernel(
            rms_norm_forward_kernel, grid, output, residual, *(vectors if scaled else (weight,) * 4), weight, bias, y,
            new_residual, mean if centered else None, rstd, rows, hidden, output.stride(0), residual.stride(0), eps,
            SCALED=scaled, CENTERED=centered, device=device, **keywords,
        )
    return y, new_residual, mean, rstd


def merge_norm_backward(
    dy: Tensor, d_new_residual: Tensor | None, output: Tensor | None, residual: Tensor, mean: Tensor | None,
    rstd: Tensor, output_bias: Tensor | None, output_scale: Tensor | None, residual_bias: Tensor | None,
    residual_scale: Tensor | None, weight: Tensor, output_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """As reference.merge_norm_backward."""
    hidden, device, scaled, centered = dy.shape[-1], dy.device, output_scale is not None, mean is not None
    vectors = contiguous(output_bias, output_scale, residual_bias, residual_scale)
    d_output, d_residual, *gradients = results = backward_results(dy, residual, mean, vectors, weight, output_dtype)
    if not dy.numel():
        return results
    dy, residual, (mean, rstd, weight) = as_rows(dy), as_rows(residual), contiguous(mean, rstd, weight)
    output, upstream = (dy if t is None else as_rows(t) for t in (output, d_new_residual))
    rows, processors = dy.shape[0], multiprocessors(device)
    grid, keywords = plan(launch, TILE_NAMES, (rows,), hidden, scaled=scaled, backward=True, processors=processors)
    (count,) = grid
    partial = torch.empty((count, (4 if scaled else 1) + centered, hidden), dtype=torch.float32, device=device)
    *d_vectors, d_weight, d_bias = gradients
    if not scaled:  # pointers that the kernels do not read
        vectors, d_vectors = (weight,) * 4, (d_weight,) * 4
    run_kernel(
        rms_norm_backward_kernel, grid, dy, upstream, output, residual, mean, rstd, *vectors, weight, d_output,
        d_residual, partial, rows, hidden, dy.stride(0), upstream.stride(0), output.stride(0), residual.stride(0),
        HAS_D_NEW_RESIDUAL=d_new_residual is not None, WRITES_D_X=scaled or output_dtype != residual.dtype,
        SCALED=scaled, CENTERED=centered, device=device, **keywords,
    )
    run_kernel(
        rms_norm_sum_kernel, (-(-hidden // 32),), partial, *vectors, *d_vectors, d_weight, d_bias if centered else None,
        count, hidden, SCALED=scaled, CENTERED=centered, PROGRAMS=64, BLOCK=32, num_warps=8, device=device,
    )
    return results
