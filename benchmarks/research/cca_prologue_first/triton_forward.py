# SPDX-License-Identifier: Apache-2.0
"""The forward kernel of the CCA prologue, one pass from the projections to query, key and value, and what it shares with
the backward pass: the product with merged taps.

With z zero before a sequence or document (reference.py),
    y_t = M_0 z_t + M_1 z_{t-1} + M_2 z_{t-2} + (W0 + W1) b0 + b1,  M_0 = a1 W1, M_1 = a0 W1 + a1 W0, M_2 = a0 W0,
where a row's taps that it does not see are left out. So the operands of the product are rows as they lie in memory, which
are copied to shared memory while the tile before is computed. The taps are rounded to the tensors' dtype, u is not.

A program has one head, whose taps stay in shared memory, and loops over tiles of BLOCK rows. Key heads, which also add
the mean of their query heads, get more programs. Importing this module imports triton.
"""

import triton
import triton.language as tl
from research.cca_prologue_first.triton_rows import SIZES, at_row, place, reach, rotation, row_before


@triton.jit
def product_rows(BLOCK: tl.constexpr):
    """Return the rows of a tile in the order of a product's rows; see `halves`."""
    r = tl.arange(0, BLOCK)
    return r // 8 % 2 * (BLOCK // 2) + r // 16 * 8 + r % 8


@triton.jit
def product_columns(D: tl.constexpr, ROTARY: tl.constexpr):
    """Return a head's channels in the order of a product's columns; see `halves`."""
    PART: tl.constexpr = min(32, D // 2)
    n = tl.arange(0, D)
    p = n // (2 * PART) * PART + n // 2 % 4 * (PART // 4) + n // 8 % (PART // 4)
    return p + tl.where(p < ROTARY // 2, n % 2 * (ROTARY // 2), ROTARY // 2 + n % 2 * ((D - ROTARY) // 2))


@triton.jit
def half_columns(D: tl.constexpr, ROTARY: tl.constexpr):
    """Return a head's pairs p [parts, 1, PART] and their channels in both halves: i and i + ROTARY / 2 rotate into each
    other; the channels from ROTARY on follow, half in each.
    """
    PART: tl.constexpr = min(32, D // 2)
    p = (tl.arange(0, D // 2 // PART) * PART)[:, None, None] + tl.arange(0, PART)[None, None, :]
    beyond = (p >= ROTARY // 2).to(tl.int32)
    return p, p + beyond * (ROTARY // 2), p + ROTARY // 2 + beyond * (D // 2 - ROTARY // 2)


@triton.jit
def halves(y, BLOCK: tl.constexpr, D: tl.constexpr):
    """Return both halves [parts, BLOCK, PART] of a product [BLOCK, D].

    With four warps on Hopper a thread holds rows r and r + 8 of a product and two of each eight columns. By the order of
    rows and columns these become eight neighbouring channels of a row, in both halves, which is how 16 bytes of a row
    are loaded and stored: no value moves to another thread.
    """
    PART: tl.constexpr = min(32, D // 2)
    y = tl.reshape(y, (BLOCK // 16, 2, 8, D // 2 // PART, PART // 4, 4, 2))
    return tl.split(tl.reshape(tl.permute(y, (3, 1, 0, 2, 5, 4, 6)), (D // 2 // PART, BLOCK, PART, 2)))


@triton.jit
def taps_product(
    at0, at1, at2, seen0, seen1, seen2, taps, m0, m1, m2, BLOCK: tl.constexpr, D: tl.constexpr, INPUTS: tl.constexpr
):
    """Return sum_j rows_j M_j [BLOCK, D] in fp32 of the rows at at_j that are seen. taps: those of the head, which m0,
    m1, m2 hold where INPUTS is D; otherwise INPUTS channels at a time are loaded.
    """
    if INPUTS == D:
        k = tl.arange(0, D)[None, :]
        rows0 = tl.load(at0[:, None] + k, mask=seen0[:, None], other=0.0)
        rows1 = tl.load(at1[:, None] + k, mask=seen1[:, None], other=0.0)
        rows2 = tl.load(at2[:, None] + k, mask=seen2[:, None], other=0.0)
        y = tl.dot(rows0, m0, input_precision="ieee")
        y = tl.dot(rows1, m1, y, input_precision="ieee")
        y = tl.dot(rows2, m2, y, input_precision="ieee")
    else:
        y = tl.zeros([BLOCK, D], tl.float32)
        for start in tl.range(0, D, INPUTS, num_stages=1):
            k = start + tl.arange(0, INPUTS)
            m = taps + k[:, None] * D + tl.arange(0, D)[None, :]
            rows0 = tl.load(at0[:, None] + k[None, :], mask=seen0[:, None], other=0.0)
            rows1 = tl.load(at1[:, None] + k[None, :], mask=seen1[:, None], other=0.0)
            rows2 = tl.load(at2[:, None] + k[None, :], mask=seen2[:, None], other=0.0)
            y = tl.dot(rows0, tl.load(m), y, input_precision="ieee")
            y = tl.dot(rows1, tl.load(m + D * D), y, input_precision="ieee")
            y = tl.dot(rows2, tl.load(m + 2 * D * D), y, input_precision="ieee")
    return y


@triton.jit
def head_taps(taps, head, D: tl.constexpr):
    """Return the address of a head's taps, and M_0, M_1, M_2 [D, D]."""
    taps += head * 3 * D * D
    at = taps + tl.arange(0, D)[:, None] * D + tl.arange(0, D)[None, :]
    return taps, tl.load(at), tl.load(at + D * D), tl.load(at + 2 * D * D)


@triton.jit
def head_and_tiles(runs, HEADS: tl.constexpr, GROUPS: tl.constexpr):
    """Return head, first tile and step of a program: the first HEADS * runs programs have query heads, the others key
    heads.
    """
    program = tl.program_id(0)
    of_key = program - HEADS * runs
    is_key = of_key >= 0
    return (
        tl.where(is_key, HEADS + of_key % GROUPS, program % HEADS),
        tl.where(is_key, of_key // GROUPS, program // HEADS),
        tl.where(is_key, (tl.num_programs(0) - HEADS * runs) // GROUPS, runs),
    )


@triton.jit
def with_means(
    x_first,
    x_second,
    base,
    head,
    group,
    first,
    second,
    to_query,
    to_key,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    D: tl.constexpr,
):
    """Return both halves of x plus half of the head's own rows and, for a query head, to_query times those of its key
    head, for a key head to_key times the sum of its query heads'. base: addresses of the rows [1, BLOCK, 1], all heads.
    """
    PER: tl.constexpr = HEADS // GROUPS
    is_key = head >= HEADS
    weight = tl.where(is_key, to_key, to_query)
    other = base + tl.where(is_key, group * PER, HEADS + group) * D
    own_first = tl.load(base + head * D + first)
    own_second = tl.load(base + head * D + second)
    other_first = tl.load(other + first)
    other_second = tl.load(other + second)
    x_first += 0.5 * own_first.to(tl.float32)
    x_second += 0.5 * own_second.to(tl.float32)
    x_first += weight * other_first.to(tl.float32)
    x_second += weight * other_second.to(tl.float32)
    if is_key:
        for i in tl.static_range(1, PER):
            x_first += weight * tl.load(other + i * D + first).to(tl.float32)
            x_second += weight * tl.load(other + i * D + second).to(tl.float32)
    return x_first, x_second


@triton.jit
def normalised(
    y,
    projected,
    rope,
    constant,
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
    BLOCK: tl.constexpr,
):
    """Return x, rotated, in two halves, and 1 / max(|x|, eps) [BLOCK] of the products y of rows f [1, BLOCK, 1]."""
    p, first, second = half_columns(D, ROTARY)
    _, entry, row, _ = place(
        tl.minimum(f, total - 1), rows, batch, by_rows, by_batch
    )  # no mask: rows behind are unused
    base = projected + at_row(row, entry, row_stride, batch_stride)
    if HAS_ROPE:
        cos, sin = rotation(rope, row, entry, p >= 0, rope_row_stride, rope_batch_stride, p, ROTARY)
    x_first, x_second = halves(y, BLOCK, D)
    x_first, x_second = with_means(
        x_first, x_second, base, head, group, first, second, 0.5, 0.5 * GROUPS / HEADS, HEADS, GROUPS, D
    )
    x_first += tl.load(constant + head * D + first)
    x_second += tl.load(constant + head * D + second)
    square = tl.sum(tl.sum(x_first * x_first + x_second * x_second, axis=2), axis=0)
    if HAS_ROPE:
        x_first, x_second = x_first * cos - x_second * sin, x_second * cos + x_first * sin
    return x_first, x_second, tl.rsqrt(tl.maximum(square, eps * eps))


@triton.jit
def product_of_rows(
    projected,
    halo,
    starts,
    f,
    total,
    rows,
    batch,
    by_rows,
    by_batch,
    row_stride,
    batch_stride,
    head,
    taps,
    m0,
    m1,
    m2,
    CHANNELS: tl.constexpr,
    D: tl.constexpr,
    HAS_HALO: tl.constexpr,
    HAS_STARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Return y of rows f, without its constant part."""
    t, entry, row, chunk = place(f, rows, batch, by_rows, by_batch)
    live = f < total
    near, far = reach(starts, t, entry, chunk, live, rows, batch, HAS_STARTS)
    base = projected + (at_row(row, entry, row_stride, batch_stride) + head * D)
    halo += head * D
    at1, exists1 = row_before(halo, base, t, entry, chunk, batch, row_stride, CHANNELS, 1, HAS_HALO)
    at2, exists2 = row_before(halo, base, t, entry, chunk, batch, row_stride, CHANNELS, 2, HAS_HALO)
    return taps_product(base, at1, at2, live, near & exists1, far & exists2, taps, m0, m1, m2, BLOCK, D, INPUTS)


@triton.jit
def late_values(
    projected,
    value_halo,
    starts,
    f,
    column,
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
    """Return value channels `column` of rows f, and which of them exist: the last DELAYED channels come from the row
    before.
    """
    CURRENT: tl.constexpr = GROUPS * D - DELAYED
    t, entry, row, chunk = place(f, rows, batch, by_rows, by_batch)
    live = f < total
    near, _ = reach(starts, t, entry, chunk, live, rows, batch, HAS_STARTS)
    late = (column >= CURRENT)[None, :]
    at = projected + at_row(row, entry, row_stride, batch_stride)[:, None] + ((HEADS + GROUPS) * D + column)[None, :]
    at -= late.to(tl.int64) * row_stride
    if HAS_HALO:
        # The halo holds the delayed channels only, so the address is CURRENT channels lower.
        before = value_halo + ((chunk * batch + entry).to(tl.int64) * DELAYED - CURRENT)[:, None] + column[None, :]
        at = tl.where(late & (t == 0)[:, None], before, at)
    else:
        near &= t >= 1
    exists = live[:, None] & (column < GROUPS * D)[None, :]
    return tl.load(at, mask=exists & (near[:, None] | (column < CURRENT)[None, :]), other=0.0), exists


@triton.jit
def cca_prologue_taps_kernel(
    depthwise_weight,
    depthwise_bias,
    grouped_weight,
    grouped_bias,
    taps,
    constant,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Program (head, part, pass): ROWS rows of the taps [2, N, 3, D, D] of a head, for the forward pass from input to
    output channels, with the constant part of y [N, D] in fp32; for the backward pass from output to input channels.
    Columns are in the order of `product_columns`.
    """
    head = tl.program_id(0)
    backward = tl.program_id(2) == 1
    k = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.where(backward, product_columns(D, D), product_columns(D, ROTARY))[None, :]
    out = tl.where(backward, k[:, None], n)
    inside = tl.where(backward, n, k[:, None])
    at = grouped_weight + ((head * D + out) * D + inside) * 2
    tap0 = tl.load(at).to(tl.float32)
    tap1 = tl.load(at + 1).to(tl.float32)
    a = depthwise_weight + (head * D + inside) * 2
    a0 = tl.load(a).to(tl.float32)
    a1 = tl.load(a + 1).to(tl.float32)
    to = taps + (((tl.program_id(2) * tl.num_programs(0) + head) * 3 * D + k[:, None]) * D + tl.arange(0, D)[None, :])
    tl.store(to, (a1 * tap1).to(taps.dtype.element_ty))
    tl.store(to + D * D, tl.fma(a0, tap1, a1 * tap0).to(taps.dtype.element_ty))
    tl.store(to + 2 * D * D, (a0 * tap0).to(taps.dtype.element_ty))
    if not backward:
        column = tl.arange(0, 2 * D)
        both = tl.load(grouped_weight + ((head * D + k) * (2 * D))[:, None] + column[None, :]).to(tl.float32)
        both *= tl.load(depthwise_bias + head * D + column // 2).to(tl.float32)[None, :]
        bias = tl.load(grouped_bias + head * D + k).to(tl.float32)
        tl.store(constant + head * D + k, bias + tl.sum(both, axis=1))


@triton.jit(do_not_specialize=SIZES)
def cca_prologue_forward_kernel(
    projected,
    taps,
    constant,
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
    runs,
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
    VALUES: tl.constexpr,
):
    """A program takes tiles of a head (`head_and_tiles`), and with them VALUES channels of their values."""
    head, begin, step = head_and_tiles(runs, HEADS, GROUPS)
    is_key = head >= HEADS
    group = tl.where(is_key, head - HEADS, head // (HEADS // GROUPS))
    taps, m0, m1, m2 = head_taps(taps, head, D)
    length = tl.where(is_key, tl.load(temperature + group).to(tl.float32), 1.0) * tl.sqrt(D * 1.0)
    if is_key:
        out = key + group * D
        out_stride = GROUPS * D
    else:
        out = query + head * D
        out_stride = HEADS * D
    pair, first, second = half_columns(D, ROTARY)
    column = head * VALUES + tl.arange(0, VALUES)
    tiles = tl.cdiv(total, BLOCK)
    for tile in tl.range(begin, tiles, step):
        y = product_of_rows(
            projected,
            halo,
            starts,
            tile * BLOCK + product_rows(BLOCK),
            total,
            rows,
            batch,
            by_rows,
            by_batch,
            row_stride,
            batch_stride,
            head,
            taps,
            m0,
            m1,
            m2,
            (HEADS + GROUPS) * D,
            D,
            HAS_HALO,
            HAS_STARTS,
            BLOCK,
            INPUTS,
        )
        if tile < tiles:  # always; Triton copies the next tile's rows before a condition at the end of a loop
            f = tile * BLOCK + tl.arange(0, BLOCK)
            values, exist = late_values(
                projected,
                value_halo,
                starts,
                f,
                column,
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
            x_first, x_second, inverse = normalised(
                y,
                projected,
                rope,
                constant,
                f[None, :, None],
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
                BLOCK,
            )
            factor = (inverse * length)[None, :, None]
            at = out + (f.to(tl.int64) * out_stride)[None, :, None]
            live = (f < total)[None, :, None]
            tl.store(at + first, (x_first * factor).to(query.dtype.element_ty), mask=live)
            tl.store(at + second, (x_second * factor).to(query.dtype.element_ty), mask=live)
            tl.store(inverse_norm + head * total.to(tl.int64) + f, inverse, mask=f < total)
            tl.store(value + (f.to(tl.int64) * (GROUPS * D))[:, None] + column[None, :], values, mask=exist)
