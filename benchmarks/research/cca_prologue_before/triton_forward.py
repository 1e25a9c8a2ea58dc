# SPDX-License-Identifier: Apache-2.0
"""The forward kernel of the CCA prologue: one pass from the projections to query, key and value.

A program has one head, whose weights stay in shared memory, and loops over tiles of BLOCK rows. The heads of a tile are
neighbours in the grid, so that shared operands - the key head's projection, the query heads' for the key head - come
from the cache. The product is [channels, rows]: the weights are the left operand, and the convolved rows, made in
registers, the right one, which Hopper reads from shared memory. A thread gets both channels of a rotating pair.
Importing this module imports triton.
"""

import triton
import triton.language as tl
from research.cca_prologue_before.triton_rows import SIZES, at_row, pair_columns, place, reach, rotation, row_before


@triton.jit
def head_weights(grouped_weight, head, start, D: tl.constexpr, ROTARY: tl.constexpr, INPUTS: tl.constexpr):
    """Load a head's weights [D, 2 INPUTS] of INPUTS input channels from `start` on.

    Columns are as in memory: input channels, both taps of each. Rows alternate between eight output channels of the
    first half and the eight of the second that rotate into them, because on Hopper a thread has rows i and i + 8 of a
    product.
    """
    row = tl.arange(0, D)
    p = row // 16 * 8 + row % 8
    rotates = p < ROTARY // 2
    half = tl.where(rotates, ROTARY // 2, (D - ROTARY) // 2)
    out = p + tl.where(rotates, 0, ROTARY // 2) + row % 16 // 8 * half
    return tl.load(
        grouped_weight + ((head * D + out) * (2 * D))[:, None] + (2 * start + tl.arange(0, 2 * INPUTS))[None, :]
    )


@triton.jit
def convolved(base, at1, at2, live, reaches1, reaches2, depthwise_weight, depthwise_bias, column):
    """Return u of the previous row and of this one, for the channels `column`, [2 columns, rows] in the order of the
    weights' columns.
    """
    z0 = tl.load(base[:, None] + column[None, :], mask=live[:, None], other=0.0)
    z1 = tl.load(at1[:, None] + column[None, :], mask=reaches1[:, None], other=0.0).to(tl.float32)
    z2 = tl.load(at2[:, None] + column[None, :], mask=reaches2[:, None], other=0.0).to(tl.float32)
    a0, a1 = tl.split(tl.load(depthwise_weight + 2 * column[:, None] + tl.arange(0, 2)[None, :]).to(tl.float32))
    a0 = a0[None, :]
    a1 = a1[None, :]
    b0 = tl.load(depthwise_bias + column).to(tl.float32)[None, :]
    before = tl.fma(a0, z2, tl.fma(a1, z1, b0)).to(z0.dtype)
    now = tl.fma(a0, z1, tl.fma(a1, z0.to(tl.float32), b0)).to(z0.dtype)
    return tl.trans(tl.reshape(tl.join(before, now), (live.shape[0], 2 * column.shape[0])))


@triton.jit
def halves(x, D: tl.constexpr):
    """Return both halves [D / 2, rows] of a product with these weights."""
    x_first, x_second = tl.split(tl.permute(tl.reshape(x, (D // 16, 2, 8, x.shape[1])), (0, 2, 3, 1)))
    return tl.reshape(x_first, (D // 2, x.shape[1])), tl.reshape(x_second, (D // 2, x.shape[1]))


@triton.jit
def rotated_head(
    projected,
    halo,
    starts,
    rope,
    depthwise_weight,
    depthwise_bias,
    weights,
    grouped_weight,
    grouped_bias,
    f,
    total,
    rows,
    batch,
    by_rows,
    by_batch,
    row_stride,
    batch_stride,
    rope_row_stride,
    rope_batch_stride,
    head,
    group,
    eps,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_HALO: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Return x of the head's rows f, rotated, in two halves [D / 2, rows] fp32, and 1 / max(|x|, eps) [rows].

    weights: the head's where INPUTS is D, otherwise not read. Loads for means and rotation come before the product,
    which hides them.
    """
    PER: tl.constexpr = HEADS // GROUPS
    channels: tl.constexpr = (HEADS + GROUPS) * D
    t, entry, row, chunk = place(f, rows, batch, by_rows, by_batch)
    live = f < total
    near, far = reach(starts, t, entry, chunk, live, rows, batch, HAS_STARTS)
    base = projected + at_row(row, entry, row_stride, batch_stride)
    at1, exists1 = row_before(projected, halo, base, t, entry, chunk, batch, row_stride, channels, 1, HAS_HALO)
    at2, exists2 = row_before(projected, halo, base, t, entry, chunk, batch, row_stride, channels, 2, HAS_HALO)
    if INPUTS == D:
        taps = convolved(
            base,
            at1,
            at2,
            live,
            near & exists1,
            far & exists2,
            depthwise_weight,
            depthwise_bias,
            head * D + tl.arange(0, D),
        )

    first, second = pair_columns(D // 2, ROTARY)
    # The mean's other operand: for a query head the key head's projection, for the key head the mean over its query
    # heads.
    is_key = head >= HEADS
    weight = tl.where(is_key, 0.5 / PER, 0.5)
    mean_at = base[None, :] + tl.where(is_key, group * PER, HEADS + group) * D
    m_first = tl.load(mean_at + first[:, None], mask=live[None, :], other=0.0)
    m_second = tl.load(mean_at + second[:, None], mask=live[None, :], other=0.0)
    if HAS_ROPE:
        cos, sin = rotation(
            rope,
            row[None, :],
            entry[None, :],
            live[None, :],
            rope_row_stride,
            rope_batch_stride,
            tl.arange(0, D // 2)[:, None],
            ROTARY,
        )
    if INPUTS == D:
        y = tl.dot(weights, taps, input_precision="ieee")
    else:
        y = tl.zeros([D, f.shape[0]], tl.float32)
        for start in tl.range(0, D, INPUTS, num_stages=1):
            column = head * D + start + tl.arange(0, INPUTS)
            taps = convolved(
                base, at1, at2, live, near & exists1, far & exists2, depthwise_weight, depthwise_bias, column
            )
            y = tl.dot(head_weights(grouped_weight, head, start, D, ROTARY, INPUTS), taps, y, input_precision="ieee")
    y_first, y_second = halves(y, D)
    # From here on the layout is that of the last loads, which are as wide as possible; the product is converted to it
    # once.
    own = base[None, :] + head * D
    bias = grouped_bias + head * D
    x_first = tl.load(bias + first).to(tl.float32)[:, None] + 0.5 * tl.load(
        own + first[:, None], mask=live[None, :], other=0.0
    ).to(tl.float32)
    x_second = tl.load(bias + second).to(tl.float32)[:, None] + 0.5 * tl.load(
        own + second[:, None], mask=live[None, :], other=0.0
    ).to(tl.float32)
    x_first += weight * m_first.to(tl.float32)
    x_second += weight * m_second.to(tl.float32)
    for i in tl.range(1, tl.where(is_key, PER, 1), num_stages=1):
        x_first += weight * tl.load(mean_at + i * D + first[:, None], mask=live[None, :], other=0.0).to(tl.float32)
        x_second += weight * tl.load(mean_at + i * D + second[:, None], mask=live[None, :], other=0.0).to(tl.float32)
    x_first += y_first
    x_second += y_second
    inverse = tl.rsqrt(tl.maximum(tl.sum(x_first * x_first + x_second * x_second, axis=0), eps * eps))
    if HAS_ROPE:
        x_first, x_second = x_first * cos - x_second * sin, x_second * cos + x_first * sin
    return x_first, x_second, inverse


@triton.jit
def shift_values(
    projected,
    value_halo,
    starts,
    value,
    f,
    total,
    rows,
    batch,
    by_rows,
    by_batch,
    row_stride,
    batch_stride,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    DELAYED: tl.constexpr,
    HAS_HALO: tl.constexpr,
    HAS_STARTS: tl.constexpr,
):
    """Write value [s, b, GROUPS * D] of rows f: the last DELAYED channels come from the row before."""
    CURRENT: tl.constexpr = GROUPS * D - DELAYED
    t, entry, row, chunk = place(f, rows, batch, by_rows, by_batch)
    live = f < total
    near, _ = reach(starts, t, entry, chunk, live, rows, batch, HAS_STARTS)
    base = at_row(row, entry, row_stride, batch_stride) + (HEADS + GROUPS) * D
    out = value + f.to(tl.int64) * (GROUPS * D)
    for i in tl.static_range(GROUPS):
        column = i * D + tl.arange(0, D)
        if CURRENT > i * D:
            mask = live[:, None] & (column < CURRENT)[None, :]
            v = tl.load(projected + base[:, None] + column[None, :], mask=mask, other=0.0)
            tl.store(out[:, None] + column[None, :], v, mask=mask)
        if CURRENT < (i + 1) * D:
            late = (column >= CURRENT)[None, :]
            v = tl.load(
                projected + (base - row_stride)[:, None] + column[None, :],
                mask=(near & (t >= 1))[:, None] & late,
                other=0.0,
            )
            if HAS_HALO:
                # The halo holds the delayed channels only, so the address is CURRENT channels lower.
                first = tl.load(
                    value_halo + ((chunk * batch + entry).to(tl.int64) * DELAYED - CURRENT)[:, None] + column[None, :],
                    mask=(near & (t == 0))[:, None] & late,
                    other=0.0,
                )
                v = tl.where((t == 0)[:, None], first, v)
            tl.store(out[:, None] + column[None, :], v, mask=live[:, None] & late)


@triton.jit(do_not_specialize=SIZES)
def cca_prologue_forward_kernel(
    projected,
    depthwise_weight,
    depthwise_bias,
    grouped_weight,
    grouped_bias,
    temperature,
    rope,
    halo,
    value_halo,
    starts,
    query,
    key,
    value,
    inverse_norm,
    total,
    rows,
    batch,
    by_rows,
    by_batch,
    row_stride,
    batch_stride,
    rope_row_stride,
    rope_batch_stride,
    eps,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    DELAYED: tl.constexpr,
    HAS_ROPE: tl.constexpr,
    HAS_HALO: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Program (head, run) takes tiles run, run + runs, ... of a head, and its share of the tiles' values."""
    head = tl.program_id(0)
    tiles = tl.cdiv(total, BLOCK)
    for tile in range(tl.program_id(1) * (HEADS + GROUPS) + head, tiles, tl.num_programs(1) * (HEADS + GROUPS)):
        f = tile * BLOCK + tl.arange(0, BLOCK)
        shift_values(
            projected,
            value_halo,
            starts,
            value,
            f,
            total,
            rows,
            batch,
            by_rows,
            by_batch,
            row_stride,
            batch_stride,
            HEADS,
            GROUPS,
            D,
            DELAYED,
            HAS_HALO,
            HAS_STARTS,
        )
    is_key = head >= HEADS
    group = tl.where(is_key, head - HEADS, head // (HEADS // GROUPS))
    weights = head_weights(grouped_weight, head, 0, D, ROTARY, INPUTS)
    length = tl.where(is_key, tl.load(temperature + group).to(tl.float32), 1.0) * tl.sqrt(D * 1.0)
    first, second = pair_columns(D // 2, ROTARY)
    dtype = query.dtype.element_ty
    if is_key:
        out = key + group * D
        out_stride = GROUPS * D
    else:
        out = query + head * D
        out_stride = HEADS * D
    # With addresses recomputed for each tile and at most 128 registers, two programs share a multiprocessor of Hopper.
    for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=1, disable_licm=True):
        f = tile * BLOCK + tl.arange(0, BLOCK)
        x_first, x_second, inverse = rotated_head(
            projected,
            halo,
            starts,
            rope,
            depthwise_weight,
            depthwise_bias,
            weights,
            grouped_weight,
            grouped_bias,
            f,
            total,
            rows,
            batch,
            by_rows,
            by_batch,
            row_stride,
            batch_stride,
            rope_row_stride,
            rope_batch_stride,
            head,
            group,
            eps,
            HEADS,
            GROUPS,
            D,
            ROTARY,
            HAS_ROPE,
            HAS_HALO,
            HAS_STARTS,
            INPUTS,
        )
        live = f < total
        at = out + (f.to(tl.int64) * out_stride)[None, :]
        factor = (inverse * length)[None, :]
        tl.store(at + first[:, None], (x_first * factor).to(dtype), mask=live[None, :])
        tl.store(at + second[:, None], (x_second * factor).to(dtype), mask=live[None, :])
        tl.store(inverse_norm + head * total.to(tl.int64) + f, inverse, mask=live)
