# SPDX-License-Identifier: Apache-2.0
"""Muon's multi-tensor momentum and weight update in Triton: one launch processes the work table of
`hip_ops.ops.muon.multi_tensor`.

A program takes chunks `program_id, program_id + grid, ...`. A whole, aligned chunk is processed in tiles of
[UNROLL, THREADS * WIDTH] elements without masks: the inner extent gives every lane WIDTH neighbouring elements (16
bytes of the widest type) and every warp one contiguous piece; the outer one keeps UNROLL loads per tensor in flight,
because the compiler moves no load above a store through an address that came from memory. Ragged ends, heads and
tensors that cannot be aligned are processed with masks in tiles of [4, THREADS], one element per lane at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from hip_ops.ops.muon.multi_tensor import ROW_WORDS, blocks_for, vector_elements, work_tables
from hip_ops.runtime.launch import WARP_SIZE, on

THREADS = 256
TILE_ELEMENTS = 16  # per thread: four vectors of 16 bytes in flight for fp32, two for bf16 only
WORDS: tl.constexpr = tl.constexpr(ROW_WORDS)


@triton.jit
def _chunk(words, chunk_rows, chunk, CHUNK: tl.constexpr):
    """Return the chunk's row, first element and number of elements, and whether it is whole and aligned."""
    row = tl.load(chunk_rows + chunk).to(tl.int64)
    numel = tl.load(words + row * WORDS + 3)
    packed = tl.load(words + row * WORDS + 4)
    first, head = packed.to(tl.int32), (packed >> 32).to(tl.int32)
    skipped = tl.maximum(head, 0)
    begin = skipped + (chunk - first).to(tl.int64) * CHUNK
    end = tl.minimum(begin + CHUNK, numel)
    whole = (head >= 0) & (end - begin == CHUNK)
    if chunk == first:  # the first chunk includes the head
        whole = whole & (head == 0)
        begin = begin - skipped
    return row, begin, (end - begin).to(tl.int32), whole


@triton.jit
def _column(words, row, begin, column: tl.constexpr, dtype: tl.constexpr):
    """Return the address of element `begin` of a row's tensor."""
    return tl.load(words + row * WORDS + column).to(tl.pointer_type(dtype)) + begin


@triton.jit
def _tile(start, UNROLL: tl.constexpr, INNER: tl.constexpr):
    return start + tl.arange(0, UNROLL)[:, None] * INNER + tl.arange(0, INNER)[None, :]


@triton.jit
def _at(pointer, offsets, WIDTH: tl.constexpr):
    """Return the addresses of a tile with groups of WIDTH neighbours, aligned to the group's size."""
    alignment: tl.constexpr = WIDTH * (pointer.dtype.element_ty.primitive_bitwidth // 8)
    return tl.max_contiguous(tl.multiple_of(pointer + offsets, [1, alignment]), [1, WIDTH])


@triton.jit
def _lerp(start, end, weight):
    """Compute torch.lerp with its two forms, exact at weights 0 and 1, each with one fused multiply-add."""
    near = tl.abs(weight) < 0.5
    coefficient = tl.where(near, weight, weight - 1.0)
    return tl.fma(end - start, tl.zeros_like(start) + coefficient, tl.where(near, start, end))


@triton.jit
def _momentum_tile(
    g, b, o, mask, scale, momentum, gradient_weight,
    MOMENTUM: tl.constexpr, OUTPUT: tl.constexpr, NESTEROV: tl.constexpr, POLICY: tl.constexpr,
):
    """Update the momenta at b and write the outputs at o. Return the outputs as stored, in fp32."""
    gradient = tl.load(g, mask=mask, eviction_policy=POLICY).to(tl.float32) * scale
    buffer = tl.load(b, mask=mask, eviction_policy=POLICY).to(tl.float32)
    new = _lerp(buffer, gradient, gradient_weight).to(MOMENTUM)
    out = _lerp(gradient, new.to(tl.float32), momentum).to(OUTPUT) if NESTEROV else new.to(tl.float32).to(OUTPUT)
    tl.store(b, new, mask=mask, eviction_policy=POLICY)
    tl.store(o, out, mask=mask)
    return out.to(tl.float32)


@triton.jit
def _update_tile(u, w, c, mask, decay, step, WEIGHT: tl.constexpr, COPY: tl.constexpr, POLICY: tl.constexpr):
    """Write the new weights to w, and rounded to c if COPY is a dtype."""
    update = tl.load(u, mask=mask, eviction_policy=POLICY).to(tl.float32)
    weight = tl.load(w, mask=mask, eviction_policy=POLICY).to(tl.float32)
    new = tl.fma(update, tl.zeros_like(update) - step, weight * decay)
    tl.store(w, new.to(WEIGHT), mask=mask, eviction_policy=POLICY)
    if COPY is not None:
        tl.store(c, new.to(COPY), mask=mask, eviction_policy=POLICY)


@triton.jit(do_not_specialize=["chunks"])
def muon_momentum_kernel(
    words, chunk_rows, chunks, grad_scale, found_inf, partials, momentum, gradient_weight,
    GRADIENT: tl.constexpr, MOMENTUM: tl.constexpr, OUTPUT: tl.constexpr, NESTEROV: tl.constexpr,
    CHUNK: tl.constexpr, UNROLL: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
):
    """Update momenta and outputs; partials[chunk] = sum of squares of the chunk's stored outputs, unless partials is
    None.
    """
    tl.static_assert(CHUNK % (UNROLL * INNER) == 0, "whole chunks go in whole tiles")
    scale = 1.0
    if grad_scale is not None:
        scale = tl.load(grad_scale)
    if found_inf is not None:
        chunks = tl.where(tl.load(found_inf) != 0.0, 0, chunks)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        row, begin, count, whole = _chunk(words, chunk_rows, chunk, CHUNK)
        g = _column(words, row, begin, 0, GRADIENT)
        b = _column(words, row, begin, 1, MOMENTUM)
        o = _column(words, row, begin, 2, OUTPUT)
        sum_of_squares = 0.0
        if whole:
            squares = tl.zeros([INNER], tl.float32)
            for start in range(0, CHUNK, UNROLL * INNER):
                offsets = _tile(start, UNROLL, INNER)
                out = _momentum_tile(
                    _at(g, offsets, WIDTH), _at(b, offsets, WIDTH), _at(o, offsets, WIDTH), None, scale, momentum,
                    gradient_weight, MOMENTUM, OUTPUT, NESTEROV, "evict_first",
                )
                if partials is not None:
                    squares += tl.sum(out * out, axis=0)
            if partials is not None:
                sum_of_squares = tl.sum(squares, axis=0)
        else:
            ragged_squares = tl.zeros([INNER // WIDTH], tl.float32)
            for start in range(0, count, 4 * (INNER // WIDTH)):
                offsets = _tile(start, 4, INNER // WIDTH)
                mask = offsets < count
                out = _momentum_tile(
                    g + offsets, b + offsets, o + offsets, mask, scale, momentum, gradient_weight, MOMENTUM, OUTPUT,
                    NESTEROV, "",
                )
                if partials is not None:
                    kept = tl.where(mask, out, 0.0)
                    ragged_squares += tl.sum(kept * kept, axis=0)
            if partials is not None:
                sum_of_squares = tl.sum(ragged_squares, axis=0)
        if partials is not None:
            tl.store(partials + chunk, sum_of_squares)


@triton.jit
def muon_square_sums_kernel(words, found_inf, partials, square_sums, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Compute square_sums[place], the sum of the partial sums of one tensor, always in the same order."""
    row = tl.program_id(0).to(tl.int64)
    numel = tl.load(words + row * WORDS + 3)
    packed = tl.load(words + row * WORDS + 4)
    place = tl.load(words + row * WORDS + 5) >> 32
    first, head = packed.to(tl.int32), (packed >> 32).to(tl.int32)
    count = tl.maximum(tl.cdiv(numel - tl.maximum(head, 0), CHUNK), tl.minimum(numel, 1)).to(tl.int32)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        sums += tl.load(partials + first + offsets, mask=offsets < count, other=0.0)
    write = True
    if found_inf is not None:
        write = tl.load(found_inf) == 0.0
    tl.store(square_sums + place, tl.sum(sums, axis=0), mask=write)


@triton.jit(do_not_specialize=["chunks"])
def muon_update_kernel(
    words, chunk_rows, chunks, found_inf, lr_pointer, lr, weight_decay,
    UPDATE: tl.constexpr, WEIGHT: tl.constexpr, COPY: tl.constexpr,
    CHUNK: tl.constexpr, UNROLL: tl.constexpr, INNER: tl.constexpr, WIDTH: tl.constexpr,
):
    """Compute weight = weight * (1 - lr * weight_decay) - lr * scale * update; the copy, if there is one, gets the
    rounded result.
    """
    tl.static_assert(CHUNK % (UNROLL * INNER) == 0, "whole chunks go in whole tiles")
    if lr_pointer is not None:
        lr = tl.load(lr_pointer)
    decay = tl.fma(-lr, weight_decay, 1.0)
    if found_inf is not None:
        chunks = tl.where(tl.load(found_inf) != 0.0, 0, chunks)
    for chunk in range(tl.program_id(0), chunks, tl.num_programs(0)):
        row, begin, count, whole = _chunk(words, chunk_rows, chunk, CHUNK)
        step = lr * tl.load(words + row * WORDS + 5).to(tl.int32).to(tl.float32, bitcast=True)
        u = _column(words, row, begin, 0, UPDATE)
        w = _column(words, row, begin, 1, WEIGHT)
        c = w if COPY is None else _column(words, row, begin, 2, COPY)
        if whole:
            for start in range(0, CHUNK, UNROLL * INNER):
                offsets = _tile(start, UNROLL, INNER)
                _update_tile(
                    _at(u, offsets, WIDTH), _at(w, offsets, WIDTH), _at(c, offsets, WIDTH), None, decay, step, WEIGHT,
                    COPY, "evict_first",
                )
        else:
            for start in range(0, count, 4 * (INNER // WIDTH)):
                offsets = _tile(start, 4, INNER // WIDTH)
                _update_tile(u + offsets, w + offsets, c + offsets, offsets < count, decay, step, WEIGHT, COPY, "")


TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


def tile_of(dtypes: Sequence[torch.dtype], wave: int) -> dict:
    """Return tile extents and warps: THREADS threads that each hold TILE_ELEMENTS / WIDTH vectors of every tensor."""
    width = vector_elements([dtype.itemsize for dtype in dtypes])
    return dict(UNROLL=TILE_ELEMENTS // width, INNER=THREADS * width, WIDTH=width, num_warps=THREADS // wave)


def muon_momentum_(gradients, momenta, outputs, square_sums, grad_scale, found_inf, momentum, nesterov) -> None:
    """As reference.muon_momentum_."""
    device = gradients[0].device
    with on(device):
        for dtypes, table in work_tables([gradients, momenta, outputs]):
            partials = None if square_sums is None else torch.empty(table.chunks, dtype=torch.float32, device=device)
            if table.chunks:
                muon_momentum_kernel[(blocks_for(table),)](
                    table.data, table.chunk_rows, table.chunks, grad_scale, found_inf, partials, momentum, 1 - momentum,
                    *(TYPES[dtype] for dtype in dtypes), nesterov, CHUNK=table.chunk_elements,
                    **tile_of(dtypes, WARP_SIZE),
                )
            if square_sums is not None:
                muon_square_sums_kernel[(table.tensors,)](
                    table.data, found_inf, partials, square_sums, CHUNK=table.chunk_elements, BLOCK=1024
                )


def muon_update_(updates, masters, params, scales, lr, lr_tensor, weight_decay, found_inf) -> None:
    """As reference.muon_update_."""
    device = params[0].device
    columns = [updates, masters, params] if masters else [updates, params]
    with on(device):
        for dtypes, table in work_tables(columns, scales):
            if table.chunks:
                copy = TYPES[dtypes[2]] if masters else None
                muon_update_kernel[(blocks_for(table),)](
                    table.data, table.chunk_rows, table.chunks, found_inf, lr_tensor, lr, weight_decay,
                    TYPES[dtypes[0]], TYPES[dtypes[1]], copy, CHUNK=table.chunk_elements, **tile_of(dtypes, WARP_SIZE),
                )
