# SPDX-License-Identifier: Apache-2.0
"""The backward kernels of the CCA prologue. No atomics: every sum over rows is a sum per program, then a sum over the
programs.

    cca_prologue_taps_kernel      weights -> merged taps M_j (triton_forward.py)
    cca_prologue_norm_kernel      d_query, d_key, query, key -> dy, the gradient of x (reference.py);
                                  d_value -> projected's value channels
    cca_prologue_input_kernel     dy -> the gradient of z and halo
    cca_prologue_weight_kernel    dy, z -> S_j = sum_t dy_t z_{t-j}^T for j = 0, 1, 2, a head and a run of tiles
    cca_prologue_sum_kernel       S -> the gradients of all parameters

The convolutions are not computed again: unit vectors come from query and key, and the sums do not contain u, since with
    u_t = a0 z_{t-1} + a1 z_t + b0
    dW1 = a1 S_0 + a0 S_1 + b0 sum dy,   dW0 = a1 S_1 + a0 S_2 + b0 sum dy,
    d a1 = sum_out W1 S_0 + W0 S_1,      d a0 = sum_out W1 S_1 + W0 S_2
and with the merged taps M_0 = a1 W1, M_1 = a0 W1 + a1 W0, M_2 = a0 W0
    dz_t = M_0^T dy_t + M_1^T dy_{t+1} + M_2^T dy_{t+2}, for the rows that see row t, plus the means' part.
Importing this module imports triton.
"""

import triton
import triton.language as tl

from hip_ops.ops.cca_prologue.triton_forward import (
    head_and_tiles,
    head_taps,
    normalised,
    piece_places,
    product_of_rows,
    product_rows,
    rows_of_mean,
    taps_product,
    with_means,
)
from hip_ops.ops.cca_prologue.triton_rows import SIZES, at_row, place, reach, rotation, row_before

LEAST_TEMPERATURE = tl.constexpr(1e-30)  # below it, keys have lost their direction


@triton.jit
def shift_value_gradients(
    d_value, d_projected, d_value_halo, starts, f, total, rows, batch, by_rows, by_batch, d_row_stride, d_batch_stride,
    d_head_stride, HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, DELAYED: tl.constexpr,
    HAS_HALO: tl.constexpr, HAS_STARTS: tl.constexpr,
):
    """Write the value channels of d_projected: a row's delayed channels get their gradient from the row after it, the
    last row's get zero.
    """
    CURRENT: tl.constexpr = GROUPS * D - DELAYED
    WIDTH: tl.constexpr = (HEADS + 2 * GROUPS) * D
    t, entry, row, chunk = place(f, rows, batch, by_rows, by_batch)
    live = f < total
    near, _ = reach(starts, t, entry, chunk, live, rows, batch, HAS_STARTS)
    base = at_row(row, entry, d_row_stride, d_batch_stride)
    out = d_projected + f.to(tl.int64) * WIDTH + (HEADS + GROUPS) * D
    for i in tl.static_range(GROUPS):
        inside = tl.arange(0, D)
        column = i * D + inside
        source = d_value + base[:, None] + (i * d_head_stride + inside)[None, :]
        if CURRENT > i * D:
            mask = live[:, None] & (column < CURRENT)[None, :]
            tl.store(out[:, None] + column[None, :], tl.load(source, mask=mask, other=0.0), mask=mask)
        if CURRENT < (i + 1) * D:
            late = (column >= CURRENT)[None, :]
            v = tl.load(source, mask=near[:, None] & late, other=0.0)
            tl.store((out - batch * WIDTH)[:, None] + column[None, :], v, mask=(live & (t >= 1))[:, None] & late)
            tl.store(out[:, None] + column[None, :], tl.zeros_like(v), mask=(live & (t == rows - 1))[:, None] & late)
            if HAS_HALO:
                tl.store(
                    d_value_halo
                    + ((chunk * batch + entry).to(tl.int64) * DELAYED - CURRENT)[:, None]
                    + column[None, :],
                    v,
                    mask=(live & (t == 0))[:, None] & late,
                )


@triton.jit(do_not_specialize=SIZES)
def cca_prologue_norm_kernel(
    d_query, d_key, d_value, query, key, inverse_norm, temperature, rope, starts, dy, d_projected, d_value_halo,
    partial_bias, partial_temperature, total, rows, batch, by_rows, by_batch, q_row_stride, q_batch_stride,
    q_head_stride, k_row_stride, k_batch_stride, k_head_stride, v_row_stride, v_batch_stride, v_head_stride,
    rope_row_stride, rope_batch_stride, inverse_eps, HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr,
    ROTARY: tl.constexpr, DELAYED: tl.constexpr, HAS_ROPE: tl.constexpr, HAS_HALO: tl.constexpr,
    HAS_STARTS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):
    """Program (role, run) takes head `role`, or the values, and tiles run, run + runs, ...; writes dy, its sums and the
    temperature's gradient.
    """
    role = tl.program_id(0)
    run = tl.program_id(1)
    step = tl.num_programs(1) * BLOCK
    if role == HEADS + GROUPS:
        for start in range(run * BLOCK, total, step):
            shift_value_gradients(
                d_value,
                d_projected,
                d_value_halo,
                starts,
                start + tl.arange(0, BLOCK),
                total,
                rows,
                batch,
                by_rows,
                by_batch,
                v_row_stride,
                v_batch_stride,
                v_head_stride,
                HEADS,
                GROUPS,
                D,
                DELAYED,
                HAS_HALO,
                HAS_STARTS,
            )
    else:
        is_key = role >= HEADS
        group = tl.where(is_key, role - HEADS, role // (HEADS // GROUPS))
        if is_key:
            upstream = d_key + group * k_head_stride
            d_row_stride = k_row_stride
            d_batch_stride = k_batch_stride
            out = key + group * D
            out_stride = GROUPS * D
        else:
            upstream = d_query + role * q_head_stride
            d_row_stride = q_row_stride
            d_batch_stride = q_batch_stride
            out = query + role * D
            out_stride = HEADS * D
        length = tl.where(is_key, tl.load(temperature + group).to(tl.float32), 1.0)
        inverse_length = tl.where(tl.abs(length) < LEAST_TEMPERATURE, 0.0, 1.0 / length)
        p = tl.arange(0, D // 2)
        first = p + p // (ROTARY // 2) * (ROTARY // 2)
        second = first + ROTARY // 2
        sum_first = tl.zeros([BLOCK, D // 2], tl.float32)
        sum_second = tl.zeros([BLOCK, D // 2], tl.float32)
        sum_along = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(run * BLOCK, total, step, num_stages=STAGES):
            f = start + tl.arange(0, BLOCK)
            live = f < total
            _, entry, row, _ = place(f, rows, batch, by_rows, by_batch)
            gradient_at = upstream + (at_row(row, entry, d_row_stride, d_batch_stride))[:, None]
            unit_at = out + (f.to(tl.int64) * out_stride)[:, None]
            g_first = tl.load(gradient_at + first[None, :], mask=live[:, None], other=0.0).to(tl.float32)
            g_second = tl.load(gradient_at + second[None, :], mask=live[:, None], other=0.0).to(tl.float32)
            # Rotated like g, with length 1: the norm's gradient is the same in the rotated frame.
            unit_first = tl.load(unit_at + first[None, :], mask=live[:, None], other=0.0).to(tl.float32) * (
                inverse_length / tl.sqrt(D * 1.0)
            )
            unit_second = tl.load(unit_at + second[None, :], mask=live[:, None], other=0.0).to(tl.float32) * (
                inverse_length / tl.sqrt(D * 1.0)
            )
            inverse = tl.load(inverse_norm + role * total.to(tl.int64) + f, mask=live, other=0.0)
            along = tl.sum(g_first * unit_first, axis=1) + tl.sum(g_second * unit_second, axis=1)
            sum_along += along
            removed = tl.where(inverse < inverse_eps, along, 0.0)[:, None]
            factor = (inverse * length * tl.sqrt(D * 1.0))[:, None]
            d_first = (g_first - unit_first * removed) * factor
            d_second = (g_second - unit_second * removed) * factor
            if HAS_ROPE:
                cos, sin = rotation(
                    rope,
                    row[:, None],
                    entry[:, None],
                    live[:, None],
                    rope_row_stride,
                    rope_batch_stride,
                    p[None, :],
                    ROTARY,
                )
                d_first, d_second = d_first * cos + d_second * sin, d_second * cos - d_first * sin
            sum_first += d_first
            sum_second += d_second
            at = dy + (f.to(tl.int64) * ((HEADS + GROUPS) * D) + role * D)[:, None]
            tl.store(at + first[None, :], d_first.to(dy.dtype.element_ty), mask=live[:, None])
            tl.store(at + second[None, :], d_second.to(dy.dtype.element_ty), mask=live[:, None])
        at = partial_bias + (run * (HEADS + GROUPS) + role) * D
        tl.store(at + first, tl.sum(sum_first, axis=0))
        tl.store(at + second, tl.sum(sum_second, axis=0))
        if is_key:
            tl.store(partial_temperature + run * GROUPS + group, tl.sum(sum_along, axis=0) * tl.sqrt(D * 1.0))


@triton.jit(do_not_specialize=SIZES)
def cca_prologue_input_kernel(
    dy, taps, starts, d_projected, d_halo, total, rows, batch, by_early, by_batch, runs, HEADS: tl.constexpr,
    GROUPS: tl.constexpr, D: tl.constexpr, HAS_HALO: tl.constexpr, HAS_STARTS: tl.constexpr, BLOCK: tl.constexpr,
    INPUTS: tl.constexpr, STAGES: tl.constexpr,
):
    """A program takes tiles of a head (`head_and_tiles`): the gradient of z. taps: those of the backward pass.

    With halo, `total` includes the rows -2 and -1 of each sequence.
    """
    CHANNELS: tl.constexpr = (HEADS + GROUPS) * D
    EARLY: tl.constexpr = 2 if HAS_HALO else 0
    head, group, begin, step = head_and_tiles(runs, HEADS, GROUPS)
    taps, m = head_taps(taps, head, D)
    tiles = tl.cdiv(total, BLOCK)
    for i in tl.range(begin, tiles, step, num_stages=STAGES, disable_licm=True):
        # in reverse order: the cache still holds what the previous kernel wrote last
        start = (tiles - 1 - i) * BLOCK
        f = start + product_rows(BLOCK)
        t, entry, row, chunk = place(f, rows + EARLY, batch, by_early, by_batch)
        t -= EARLY
        live = f < total
        near, _ = reach(starts, t + 1, entry, chunk, live & (t >= -1) & (t + 1 < rows), rows, batch, HAS_STARTS)
        _, far = reach(starts, t + 2, entry, chunk, live & (t + 2 < rows), rows, batch, HAS_STARTS)
        base = dy + (((chunk * rows + t) * batch + entry).to(tl.int64) * CHANNELS + head * D)
        at = (base, base + batch * CHANNELS, base + 2 * batch * CHANNELS)
        x = taps_product(at, (live & (t >= 0), near, far), taps, m, BLOCK, D, D, INPUTS)
        at_tile, pair, channel = piece_places(BLOCK, D, D)
        f2 = start + at_tile
        t2, entry2, row2, chunk2 = place(tl.minimum(f2, total - 1), rows + EARLY, batch, by_early, by_batch)
        flat = ((chunk2 * rows + tl.maximum(t2 - EARLY, 0)) * batch + entry2).to(tl.int64)
        at_other, other = rows_of_mean(dy + flat * CHANNELS + channel, head, group, HEADS, GROUPS, D)
        if i < tiles:  # always: see triton_forward.py
            channel += head * D
            if HAS_HALO:
                to_halo = d_halo + ((chunk2 * 2 + t2) * batch + entry2).to(tl.int64) * CHANNELS + channel
                tl.store(to_halo, x.to(dy.dtype.element_ty), mask=(f2 < total) & (t2 < EARLY))
            dz = with_means(x, at_other, other, head, 0.5 * GROUPS / HEADS, 0.5, HEADS, GROUPS, D)
            mask = (f2 < total) & (t2 >= EARLY)
            tl.store(d_projected + flat * (CHANNELS + GROUPS * D) + channel, dz.to(dy.dtype.element_ty), mask=mask)


@triton.jit
def zero_temperature(
    d_key, projected, taps, constant, rope, halo, starts, partial, total, rows, batch, by_rows, by_batch, row_stride,
    batch_stride, k_row_stride, k_batch_stride, k_head_stride, rope_row_stride, rope_batch_stride, eps, group,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, HAS_ROPE: tl.constexpr,
    HAS_HALO: tl.constexpr, HAS_STARTS: tl.constexpr, BLOCK: tl.constexpr, INPUTS: tl.constexpr,
):
    """Compute the temperature's gradient where the temperature is zero: the key is zero too, so its direction is
    computed again. taps: those of the forward pass.
    """
    head = HEADS + group
    taps, m = head_taps(taps, head, D)
    at_tile, pair, channel = piece_places(BLOCK, D, ROTARY)
    along = tl.zeros([1], tl.float32)
    for start in range(tl.program_id(1) * BLOCK, total, tl.num_programs(1) * BLOCK):
        x = product_of_rows(
            projected, halo, starts, start + product_rows(BLOCK), total, rows, batch, by_rows, by_batch, row_stride,
            batch_stride, head, taps, m, (HEADS + GROUPS) * D, D, ROTARY, HAS_HALO, HAS_STARTS, BLOCK, INPUTS,
        )
        f = start + at_tile
        t, entry, row, chunk = place(tl.minimum(f, total - 1), rows, batch, by_rows, by_batch)
        at, other = rows_of_mean(
            projected + at_row(row, entry, row_stride, batch_stride) + channel, head, group, HEADS, GROUPS, D
        )
        x, inverse = normalised(
            x, at, other, rope, constant, row, entry, pair, channel, rope_row_stride,
            rope_batch_stride, head, eps, HEADS, GROUPS, D, ROTARY, HAS_ROPE, BLOCK,
        )
        at = d_key + (group * k_head_stride + at_row(row, entry, k_row_stride, k_batch_stride)) + channel
        along += tl.sum(tl.sum(x * tl.load(at, mask=f < total, other=0.0).to(tl.float32), axis=1), axis=0)
    tl.store(partial + tl.program_id(1) * GROUPS + group, tl.sum(along, axis=0))


@triton.jit(do_not_specialize=SIZES)
def cca_prologue_weight_kernel(
    dy, d_key, projected, taps, constant, temperature, rope, halo, starts, partial, partial_zero, total, rows, batch,
    by_rows, by_batch, row_stride, batch_stride, k_row_stride, k_batch_stride, k_head_stride, rope_row_stride,
    rope_batch_stride, eps, HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    HAS_ROPE: tl.constexpr, HAS_HALO: tl.constexpr, HAS_STARTS: tl.constexpr, BLOCK: tl.constexpr, OUT: tl.constexpr,
    ZERO_BLOCK: tl.constexpr, INPUTS: tl.constexpr,
):
    """Program (part, run), tiles run, run + runs, ...: S_0, S_1, S_2 of OUT output channels of a head to partial [runs,
    N, 3, D, D].

    The programs after the parts of all heads take the groups, whose keys may have temperature zero.
    """
    PARTS: tl.constexpr = D // OUT
    CHANNELS: tl.constexpr = (HEADS + GROUPS) * D
    head = tl.program_id(0) // PARTS
    if head < HEADS + GROUPS:
        out = tl.program_id(0) % PARTS * OUT + tl.arange(0, OUT)
        inside = tl.arange(0, D)
        column = head * D + inside
        s0 = tl.zeros([OUT, D], tl.float32)
        s1 = tl.zeros([OUT, D], tl.float32)
        s2 = tl.zeros([OUT, D], tl.float32)
        for tile in range(tl.program_id(1), tl.cdiv(total, BLOCK), tl.num_programs(1)):
            f = tile * BLOCK + tl.arange(0, BLOCK)
            live = f < total
            t, entry, row, chunk = place(f, rows, batch, by_rows, by_batch)
            near, far = reach(starts, t, entry, chunk, live, rows, batch, HAS_STARTS)
            base = projected + at_row(row, entry, row_stride, batch_stride)
            at1, exists1 = row_before(halo, base, t, entry, chunk, batch, row_stride, CHANNELS, 1, HAS_HALO)
            at2, exists2 = row_before(halo, base, t, entry, chunk, batch, row_stride, CHANNELS, 2, HAS_HALO)
            z0 = tl.load(base[:, None] + column[None, :], mask=live[:, None], other=0.0)
            z1 = tl.load(at1[:, None] + column[None, :], mask=(near & exists1)[:, None], other=0.0)
            z2 = tl.load(at2[:, None] + column[None, :], mask=(far & exists2)[:, None], other=0.0)
            d = tl.trans(
                tl.load(
                    dy + (f.to(tl.int64) * CHANNELS + head * D)[:, None] + out[None, :], mask=live[:, None], other=0.0
                )
            )
            s0 = tl.dot(d, z0, s0, input_precision="ieee")
            s1 = tl.dot(d, z1, s1, input_precision="ieee")
            s2 = tl.dot(d, z2, s2, input_precision="ieee")
        at = partial + ((tl.program_id(1) * (HEADS + GROUPS) + head) * 3 * D + out[:, None]) * D + inside[None, :]
        tl.store(at, s0)
        tl.store(at + D * D, s1)
        tl.store(at + 2 * D * D, s2)
    else:
        group = tl.program_id(0) - (HEADS + GROUPS) * PARTS
        if tl.abs(tl.load(temperature + group).to(tl.float32)) < LEAST_TEMPERATURE:
            zero_temperature(
                d_key, projected, taps, constant, rope, halo, starts, partial_zero, total, rows, batch, by_rows,
                by_batch, row_stride, batch_stride, k_row_stride, k_batch_stride, k_head_stride, rope_row_stride,
                rope_batch_stride, eps, group, HEADS, GROUPS, D, ROTARY, HAS_ROPE, HAS_HALO, HAS_STARTS, ZERO_BLOCK,
                INPUTS,
            )


@triton.jit(do_not_specialize=SIZES)
def cca_prologue_sum_kernel(
    partial, partial_bias, partial_temperature, partial_zero, depthwise_weight, depthwise_bias, grouped_weight,
    temperature, d_depthwise_weight, d_depthwise_bias, d_grouped_weight, d_grouped_bias, d_temperature, runs, bias_runs,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, TOGETHER: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Program (head, part): all gradients that belong to COLUMNS input channels of a head. TOGETHER runs of partial are
    in flight.
    """
    head = tl.program_id(0)
    out = tl.arange(0, D)
    into = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    dtype = d_grouped_weight.dtype.element_ty
    # The operands of the last step are loaded during the sums.
    a0 = tl.load(depthwise_weight + 2 * (head * D + into)).to(tl.float32)[None, :]
    a1 = tl.load(depthwise_weight + 2 * (head * D + into) + 1).to(tl.float32)[None, :]
    b0 = tl.load(depthwise_bias + head * D + into).to(tl.float32)[None, :]
    at = ((head * D + out[:, None]) * D + into[None, :]) * 2
    tap0 = tl.load(grouped_weight + at)
    tap1 = tl.load(grouped_weight + at + 1)
    bias = tl.zeros([RUNS, D], tl.float32)
    for start in range(0, bias_runs, RUNS):
        several = start + tl.arange(0, RUNS)
        bias += tl.load(
            partial_bias + ((several * (HEADS + GROUPS) + head) * D)[:, None] + out[None, :],
            mask=(several < bias_runs)[:, None],
            other=0.0,
        )
    s0 = tl.zeros([D, COLUMNS], tl.float32)
    s1 = tl.zeros([D, COLUMNS], tl.float32)
    s2 = tl.zeros([D, COLUMNS], tl.float32)
    for start in range(0, runs, TOGETHER):
        for i in tl.static_range(TOGETHER):
            of_run = partial + (((start + i) * (HEADS + GROUPS) + head) * 3 * D + out[:, None]) * D + into[None, :]
            s0 += tl.load(of_run, mask=start + i < runs, other=0.0)
            s1 += tl.load(of_run + D * D, mask=start + i < runs, other=0.0)
            s2 += tl.load(of_run + 2 * D * D, mask=start + i < runs, other=0.0)
    db = tl.sum(bias, axis=0)
    tap0 = tap0.to(tl.float32)
    tap1 = tap1.to(tl.float32)
    tl.store(d_grouped_weight + at, (a1 * s1 + a0 * s2 + b0 * db[:, None]).to(dtype))
    tl.store(d_grouped_weight + at + 1, (a1 * s0 + a0 * s1 + b0 * db[:, None]).to(dtype))
    tl.store(d_depthwise_weight + 2 * (head * D + into), tl.sum(tap1 * s1 + tap0 * s2, axis=0).to(dtype))
    tl.store(d_depthwise_weight + 2 * (head * D + into) + 1, tl.sum(tap1 * s0 + tap0 * s1, axis=0).to(dtype))
    tl.store(d_depthwise_bias + head * D + into, tl.sum((tap0 + tap1) * db[:, None], axis=0).to(dtype))
    if tl.program_id(1) == 0:
        tl.store(d_grouped_bias + head * D + out, db.to(dtype))
        if head >= HEADS:
            group = head - HEADS
            is_zero = tl.abs(tl.load(temperature + group).to(tl.float32)) < LEAST_TEMPERATURE
            count = tl.where(is_zero, runs, bias_runs)
            partials = partial_zero if is_zero else partial_temperature
            along = tl.zeros([RUNS], tl.float32)
            for start in range(0, count, RUNS):
                several = start + tl.arange(0, RUNS)
                along += tl.load(partials + several * GROUPS + group, mask=several < count, other=0.0)
            tl.store(d_temperature + group, tl.sum(along, axis=0).to(d_temperature.dtype.element_ty))
