# SPDX-License-Identifier: Apache-2.0
"""The forward kernel of the CCA prologue: one pass from the projections to what attention reads.

A program has one head and some tiles of BLOCK rows, or the values of these rows. The heads of a tile are neighbours in the grid: what
they share - the key head's projection, the query heads' in the key head - comes from the cache. The two halves of a head that rotate
into each other are products of their own, so that the rotation moves no data between threads. Products are [channels, rows]: the
weights, which stay, are the left operand, and the convolved rows, made in registers, the right one, which Hopper reads from shared memory.
Importing this module imports triton.
"""

import triton
import triton.language as tl

from hip_ops.triton_kernels.cca_prologue_rows import SIZES, at_row, pair_columns, place, reach, rotation, row_before


@triton.jit
def head_weights(grouped_weight, grouped_bias, head, out, D: tl.constexpr):
    """The weights of the output channels `out` of a head, as in memory: half of the input channels [out, D], and of each both taps; the other half; the bias."""
    at = grouped_weight + ((head * D + out) * (2 * D))[:, None] + tl.arange(0, D)[None, :]
    return tl.load(at), tl.load(at + D), tl.load(grouped_bias + head * D + out).to(tl.float32)


@triton.jit
def taps_of(base, at1, at2, live, reaches1, reaches2, depthwise_weight, depthwise_bias, column, ROWS: tl.constexpr, HALF: tl.constexpr):
    """u of the row before and of this one, of some channels of a head [2 * HALF, rows], in the order of the weights."""
    z0 = tl.load(base[:, None] + column[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    z1 = tl.load(at1[:, None] + column[None, :], mask=reaches1[:, None], other=0.0).to(tl.float32)
    z2 = tl.load(at2[:, None] + column[None, :], mask=reaches2[:, None], other=0.0).to(tl.float32)
    a0, a1 = tl.split(tl.load(depthwise_weight + 2 * column[:, None] + tl.arange(0, 2)[None, :]).to(tl.float32))
    a0 = a0[None, :]
    a1 = a1[None, :]
    b0 = tl.load(depthwise_bias + column).to(tl.float32)[None, :]
    dtype = depthwise_weight.dtype.element_ty
    before = tl.fma(a0, z2, tl.fma(a1, z1, b0)).to(dtype)
    now = tl.fma(a0, z1, tl.fma(a1, z0, b0)).to(dtype)
    return tl.trans(tl.reshape(tl.join(before, now), (ROWS, 2 * HALF)))


@triton.jit
def unit_head(
    projected, halo, starts, depthwise_weight, depthwise_bias, first_low, first_high, bias_first, second_low, second_high, bias_second, f, total, rows, batch, by_rows, by_batch, row_stride, batch_stride, head, group, eps, HEADS: tl.constexpr, GROUPS: tl.constexpr,
    D: tl.constexpr, ROTARY: tl.constexpr, HAS_HALO: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """x of the head's rows f in two halves [D / 2, rows] fp32, and 1 / max(|x|, eps) [rows]."""
    PER: tl.constexpr = HEADS // GROUPS
    channels: tl.constexpr = (HEADS + GROUPS) * D
    t, entry, row, chunk = place(f, rows, batch, by_rows, by_batch)
    live = f < total
    near, far = reach(starts, t, entry, chunk, live, rows, batch, HAS_STARTS)
    base = at_row(row, entry, row_stride, batch_stride)
    column = head * D + tl.arange(0, D // 2)
    at1, exists1 = row_before(projected, halo, projected + base, t, entry, chunk, batch, row_stride, channels, 1, HAS_HALO)
    at2, exists2 = row_before(projected, halo, projected + base, t, entry, chunk, batch, row_stride, channels, 2, HAS_HALO)
    # Half of the input channels at a time, which takes half the registers; added by a factor that changes nothing, for a chain of products would be laid out for twice the rows.
    one = tl.where(total > 0, 1.0, 0.0)
    taps = taps_of(projected + base, at1, at2, live, near & exists1, far & exists2, depthwise_weight, depthwise_bias, column, f.shape[0], D // 2)
    x_first = tl.dot(first_low, taps, input_precision="ieee") * one + bias_first[:, None]
    x_second = tl.dot(second_low, taps, input_precision="ieee") * one + bias_second[:, None]
    taps = taps_of(projected + base, at1, at2, live, near & exists1, far & exists2, depthwise_weight, depthwise_bias, column + D // 2, f.shape[0], D // 2)
    x_first += tl.dot(first_high, taps, input_precision="ieee") * one
    x_second += tl.dot(second_high, taps, input_precision="ieee") * one

    first, second = pair_columns(D // 2, ROTARY)
    here = projected + base[None, :] + head * D
    x_first += 0.5 * tl.load(here + first[:, None], mask=live[None, :], other=0.0).to(tl.float32)
    x_second += 0.5 * tl.load(here + second[:, None], mask=live[None, :], other=0.0).to(tl.float32)
    # A query head's other half is the key head's projection, the key head's the mean of its query heads'.
    is_key = head >= HEADS
    weight = tl.where(is_key, 0.5 / PER, 0.5)
    other = tl.where(is_key, group * PER, HEADS + group)
    for i in tl.range(0, tl.where(is_key, PER, 1), num_stages=1):
        here = projected + base[None, :] + (other + i) * D
        x_first += weight * tl.load(here + first[:, None], mask=live[None, :], other=0.0).to(tl.float32)
        x_second += weight * tl.load(here + second[:, None], mask=live[None, :], other=0.0).to(tl.float32)
    square = tl.sum(x_first * x_first, axis=0) + tl.sum(x_second * x_second, axis=0)
    return x_first, x_second, tl.rsqrt(tl.maximum(square, eps * eps))


@triton.jit
def shift_values(
    projected, value_halo, starts, value, f, total, rows, batch, by_rows, by_batch, row_stride, batch_stride, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, D: tl.constexpr, DELAYED: tl.constexpr, HAS_HALO: tl.constexpr, HAS_STARTS: tl.constexpr,
):  # fmt: skip
    """value [s, b, GROUPS * D] of rows f: the last DELAYED channels come from the row before."""
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
            v = tl.load(projected + (base - row_stride)[:, None] + column[None, :], mask=(near & (t >= 1))[:, None] & late, other=0.0)
            if HAS_HALO:
                # CURRENT channels less than where the row would be: only the delayed ones are kept.
                first = tl.load(value_halo + ((chunk * batch + entry).to(tl.int64) * DELAYED - CURRENT)[:, None] + column[None, :], mask=(near & (t == 0))[:, None] & late, other=0.0)
                v = tl.where((t == 0)[:, None], first, v)
            tl.store(out[:, None] + column[None, :], v, mask=live[:, None] & late)


@triton.jit(do_not_specialize=SIZES)
def cca_prologue_forward_kernel(
    projected, depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, temperature, rope, halo, value_halo, starts, query,
    key, value, inverse_norm, total, rows, batch, by_rows, by_batch, row_stride, batch_stride, rope_row_stride, rope_batch_stride, tiles, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, DELAYED: tl.constexpr,
    HAS_ROPE: tl.constexpr, HAS_HALO: tl.constexpr, HAS_STARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (role, run): head `role`, or the values where it is HEADS + GROUPS, of `tiles` tiles from run * tiles on."""
    role = tl.program_id(0)
    first_row = tl.program_id(1) * (tiles * BLOCK)
    end = tl.minimum(first_row + tiles * BLOCK, total)
    if role == HEADS + GROUPS:
        for start in range(first_row, end, BLOCK):
            f = start + tl.arange(0, BLOCK)
            shift_values(projected, value_halo, starts, value, f, total, rows, batch, by_rows, by_batch, row_stride, batch_stride, HEADS, GROUPS, D,
                         DELAYED, HAS_HALO, HAS_STARTS)  # fmt: skip
    else:
        is_key = role >= HEADS
        group = tl.where(is_key, role - HEADS, role // (HEADS // GROUPS))
        first, second = pair_columns(D // 2, ROTARY)
        first_low, first_high, bias_first = head_weights(grouped_weight, grouped_bias, role, first, D)
        second_low, second_high, bias_second = head_weights(grouped_weight, grouped_bias, role, second, D)
        length = tl.load(temperature + group).to(tl.float32)
        scale = tl.where(is_key, length, 1.0) * tl.sqrt(D * 1.0)
        if is_key:
            out = key + group * D
            out_stride = GROUPS * D
        else:
            out = query + role * D
            out_stride = HEADS * D
        for start in range(first_row, end, BLOCK):
            f = start + tl.arange(0, BLOCK)
            x_first, x_second, inverse = unit_head(
                projected, halo, starts, depthwise_weight, depthwise_bias, first_low, first_high, bias_first,
                second_low, second_high, bias_second, f, total, rows, batch, by_rows, by_batch, row_stride, batch_stride, role, group, eps, HEADS, GROUPS, D,
                ROTARY, HAS_HALO, HAS_STARTS,
            )  # fmt: skip
            _, entry, row, _ = place(f, rows, batch, by_rows, by_batch)
            live = f < total
            tl.store(inverse_norm + role * total.to(tl.int64) + f, inverse, mask=live)
            x_first *= (inverse * scale)[None, :]
            x_second *= (inverse * scale)[None, :]
            if HAS_ROPE:
                cos, sin = rotation(rope, row[None, :], entry[None, :], live[None, :], rope_row_stride, rope_batch_stride, tl.arange(0, D // 2)[:, None], ROTARY)
                x_first, x_second = x_first * cos - x_second * sin, x_second * cos + x_first * sin
            at = out + (f.to(tl.int64) * out_stride)[None, :]
            dtype = query.dtype.element_ty
            tl.store(at + first[:, None], x_first.to(dtype), mask=live[None, :])
            tl.store(at + second[:, None], x_second.to(dtype), mask=live[None, :])
