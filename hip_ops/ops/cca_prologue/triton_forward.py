# SPDX-License-Identifier: Apache-2.0
"""The forward kernel of the CCA prologue, one pass from the projections to query, key and value, and what it shares
with the backward pass: the product with merged taps.

With z zero before a sequence or document (reference.py),
    y_t = M_0 z_t + M_1 z_{t-1} + M_2 z_{t-2} + (W0 + W1) b0 + b1,  M_0 = a1 W1, M_1 = a0 W1 + a1 W0, M_2 = a0 W0,
where a row's taps that it does not see are left out. So the operands of the product are rows as they lie in memory,
which are copied to shared memory while the tile before is computed. The taps are rounded to the tensors' dtype, u is
not.

A program has one head, whose taps stay in shared memory, and loops over tiles of BLOCK rows. Key heads, which also add
the mean of their query heads, get more programs.

For the copies ahead Triton 3.5 to 3.8 need that the loop holds no other loop, that what follows the product is under a
condition, except for one addition to the product (3.6 fails without it), and that begin and step of the loop come from
no branch (3.5). Importing this module imports triton.
"""

import triton
import triton.language as tl

from hip_ops.ops.cca_prologue.triton_rows import SIZES, at_row, place, reach, rotation, row_before


@triton.jit
def product_rows(BLOCK: tl.constexpr):
    """Return the rows of a tile in the order of a product's rows; see `pieces`."""
    r = tl.arange(0, BLOCK)
    return r // 8 % 2 * (BLOCK // 2) + r // 16 * 8 + r % 8


@triton.jit
def product_columns(D: tl.constexpr, ROTARY: tl.constexpr):
    """Return a head's channels in the order of a product's columns; see `pieces`."""
    PART: tl.constexpr = 32 if D > 32 else D // 2
    n = tl.arange(0, D)
    p = n // (2 * PART) * PART + n // 2 % 4 * (PART // 4) + n // 8 % (PART // 4)
    return p + (p // (ROTARY // 2) + n % 2) * (ROTARY // 2)


@triton.jit
def pieces(y, BLOCK: tl.constexpr, D: tl.constexpr):
    """Return a product [BLOCK, D] as pieces of its rows [D / PART * BLOCK, PART]: first those of the first channels of
    all pairs, then those of the second ones; in each half all rows of PART channels, then of the next PART.

    With four warps on Hopper a thread holds rows r and r + 8 of a product and two of each eight columns. By the order
    of rows and columns these become eight neighbouring channels of pieces, which is how 16 bytes of a row are loaded
    and stored: no value moves to another thread.
    """
    PART: tl.constexpr = 32 if D > 32 else D // 2
    y = tl.permute(tl.reshape(y, (BLOCK // 16, 2, 8, D // 2 // PART, PART // 4, 4, 2)), (6, 3, 1, 0, 2, 5, 4))
    return tl.reshape(y, (D // PART * BLOCK, PART))


@triton.jit
def own_pieces(x, BLOCK: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr):
    """Return x [BLOCK, D], whose rows are in the order of a product's, as `pieces`."""
    PART: tl.constexpr = 32 if D > 32 else D // 2
    x = tl.permute(tl.reshape(x, (BLOCK // 16, 2, 8, D // ROTARY, 2, ROTARY // 2)), (4, 1, 0, 2, 3, 5))
    x = tl.permute(tl.reshape(x, (2, BLOCK, D // 2 // PART, PART)), (0, 2, 1, 3))
    return tl.reshape(x, (D // PART * BLOCK, PART))


@triton.jit
def piece_places(BLOCK: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr):
    """Return the row of a tile, [pieces, 1], the pair and the channel, [pieces, PART], of `pieces`. Channels i and
    i + ROTARY / 2 are a pair: of the first ROTARY, which rotate into each other, and likewise of the others.
    """
    PART: tl.constexpr = 32 if D > 32 else D // 2
    r = tl.arange(0, D // PART * BLOCK)[:, None]
    p = r // BLOCK % (D // 2 // PART) * PART + tl.arange(0, PART)[None, :]
    half = r // (D // 2 // PART * BLOCK)
    return r % BLOCK, p, p + (p // (ROTARY // 2) + half) * (ROTARY // 2)


@triton.jit
def taps_product(
    at, seen, taps, m, BLOCK: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, INPUTS: tl.constexpr
):
    """Return the pieces of rows_0 / 2 + sum_j rows_j M_j in fp32 of the rows at at[j] that are seen. taps, m: the
    address and the values of the head's (`head_taps`); where INPUTS is less than D, INPUTS channels of the taps are
    loaded at a time.
    """
    k = tl.arange(0, D)[None, :]
    own = tl.load(at[0][:, None] + k, mask=seen[0][:, None], other=0.0)
    y = tl.zeros([BLOCK, D], tl.float32)
    if INPUTS == D:
        y = tl.dot(own, m[0], y, input_precision="ieee")
        for j in tl.static_range(1, 3):
            rows = tl.load(at[j][:, None] + k, mask=seen[j][:, None], other=0.0)
            y = tl.dot(rows, m[j], y, input_precision="ieee")
    else:
        for start in tl.range(0, D, INPUTS, num_stages=1):
            part = start + tl.arange(0, INPUTS)
            for j in tl.static_range(3):
                rows = tl.load(at[j][:, None] + part[None, :], mask=seen[j][:, None], other=0.0)
                y = tl.dot(rows, tl.load(taps + (j * D + part[:, None]) * D + k), y, input_precision="ieee")
    return pieces(y, BLOCK, D) + 0.5 * own_pieces(own, BLOCK, D, ROTARY).to(tl.float32)


@triton.jit
def head_taps(taps, head, D: tl.constexpr):
    """Return the address of a head's taps, and M_0, M_1, M_2 [D, D]."""
    taps += head * 3 * D * D
    at = taps + tl.arange(0, D)[:, None] * D + tl.arange(0, D)[None, :]
    return taps, (tl.load(at), tl.load(at + D * D), tl.load(at + 2 * D * D))


@triton.jit
def head_and_tiles(runs, HEADS: tl.constexpr, GROUPS: tl.constexpr):
    """Return head, group, first tile and step of a program: the first HEADS * runs programs have query heads, the
    others key heads.
    """
    of_key = tl.program_id(0) - HEADS * runs
    is_key = of_key >= 0
    head = tl.where(is_key, HEADS + of_key % GROUPS, tl.program_id(0) % HEADS)
    group = tl.where(is_key, of_key % GROUPS, head // (HEADS // GROUPS))
    begin = tl.where(is_key, of_key // GROUPS, tl.program_id(0) // HEADS)
    return head, group, begin, tl.where(is_key, tl.num_programs(0) // GROUPS - HEADS // GROUPS * runs, runs)


@triton.jit
def rows_of_mean(base, head, group, HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr):
    """Return the address and the values of the pieces with which a head shares a mean, of its key head or of its first
    query head. base: addresses of the pieces, without the head.
    """
    at = base + tl.where(head >= HEADS, group * (HEADS // GROUPS), HEADS + group) * D
    return at, tl.load(at)


@triton.jit
def with_means(
    x, at, other, head, to_query, to_key, HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr
):
    """Return the pieces x plus, for a query head, to_query times those of its key head, for a key head to_key times the
    sum of its query heads'. at, other: from rows_of_mean.
    """
    weight = tl.where(head >= HEADS, to_key, to_query)
    x += weight * other.to(tl.float32)
    if head >= HEADS:
        for i in tl.static_range(1, HEADS // GROUPS):
            x += weight * tl.load(at + i * D).to(tl.float32)
    return x


@triton.jit
def normalised(
    x, at, other, rope, constant, row, entry, pair, channel, rope_row_stride, rope_batch_stride, head, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, HAS_ROPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return the pieces x, from product_of_rows, as queries or keys of length sqrt(D), and 1 / max(|x|, eps)
    [BLOCK].
    """
    PIECES: tl.constexpr = D // channel.shape[1]
    x = with_means(x, at, other, head, 0.5, 0.5 * GROUPS / HEADS, HEADS, GROUPS, D)
    x += tl.load(constant + head * D + channel)
    square = tl.sum(tl.reshape(tl.sum(x * x, axis=1), (PIECES, BLOCK)), axis=0)
    inverse = tl.rsqrt(tl.maximum(square, eps * eps))
    x *= tl.reshape(tl.broadcast_to((inverse * tl.sqrt(D * 1.0))[None, :], (PIECES, BLOCK)), (PIECES * BLOCK, 1))
    if HAS_ROPE:
        cos, sin = rotation(rope, row, entry, pair >= 0, rope_row_stride, rope_batch_stride, pair, ROTARY)
        first, second = tl.split(tl.permute(tl.reshape(x, (2, x.shape[0] // 2, x.shape[1])), (1, 2, 0)))
        x = x * cos + tl.reshape(tl.permute(tl.join(-second, first), (2, 0, 1)), x.shape) * sin
    return x, inverse


@triton.jit
def product_of_rows(
    projected, halo, starts, f, total, rows, batch, by_rows, by_batch, row_stride, batch_stride, head, taps, m,
    CHANNELS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, HAS_HALO: tl.constexpr, HAS_STARTS: tl.constexpr,
    BLOCK: tl.constexpr, INPUTS: tl.constexpr,
):
    """Return the pieces of x of rows f (reference.py) without the constant part of y and without other heads' part."""
    t, entry, row, chunk = place(f, rows, batch, by_rows, by_batch)
    live = f < total
    near, far = reach(starts, t, entry, chunk, live, rows, batch, HAS_STARTS)
    base = projected + (at_row(row, entry, row_stride, batch_stride) + head * D)
    halo += head * D
    at1, exists1 = row_before(halo, base, t, entry, chunk, batch, row_stride, CHANNELS, 1, HAS_HALO)
    at2, exists2 = row_before(halo, base, t, entry, chunk, batch, row_stride, CHANNELS, 2, HAS_HALO)
    return taps_product((base, at1, at2), (live, near & exists1, far & exists2), taps, m, BLOCK, D, ROTARY, INPUTS)


@triton.jit
def late_values(
    projected, value_halo, starts, f, column, total, rows, batch, by_rows, by_batch, row_stride, batch_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, DELAYED: tl.constexpr, HAS_HALO: tl.constexpr,
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
    depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, taps, constant, D: tl.constexpr,
    ROTARY: tl.constexpr, ROWS: tl.constexpr,
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
        b0 = tl.load(depthwise_bias + head * D + column // 2).to(tl.float32)
        b1 = tl.load(grouped_bias + head * D + k).to(tl.float32)
        tl.store(constant + head * D + k, tl.sum(both * b0[None, :], axis=1) + b1)


@triton.jit(do_not_specialize=SIZES)
def cca_prologue_forward_kernel(
    projected, taps, constant, temperature, rope, halo, value_halo, starts, query, key, value, inverse_norm, total,
    rows, batch, by_rows, by_batch, runs, row_stride, batch_stride, rope_row_stride, rope_batch_stride, eps,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, DELAYED: tl.constexpr,
    HAS_ROPE: tl.constexpr, HAS_HALO: tl.constexpr, HAS_STARTS: tl.constexpr, BLOCK: tl.constexpr,
    INPUTS: tl.constexpr, VALUES: tl.constexpr, STAGES: tl.constexpr,
):
    """A program takes tiles of a head (`head_and_tiles`), and with them VALUES channels of their values."""
    head, group, begin, step = head_and_tiles(runs, HEADS, GROUPS)
    taps, m = head_taps(taps, head, D)
    length = 1.0
    if head >= HEADS:
        length = tl.load(temperature + group).to(tl.float32)
        out = key + group * D
        out_stride = GROUPS * D
    else:
        out = query + head * D
        out_stride = HEADS * D
    of_value = head * VALUES + tl.arange(0, VALUES)
    tiles = tl.cdiv(total, BLOCK)
    for tile in tl.range(begin, tiles, step, num_stages=STAGES, disable_licm=True):
        x = product_of_rows(
            projected, halo, starts, tile * BLOCK + product_rows(BLOCK), total, rows, batch, by_rows, by_batch,
            row_stride, batch_stride, head, taps, m, (HEADS + GROUPS) * D, D, ROTARY, HAS_HALO, HAS_STARTS, BLOCK,
            INPUTS,
        )
        at_tile, pair, channel = piece_places(BLOCK, D, ROTARY)
        f2 = tile * BLOCK + at_tile
        _, entry, row, _ = place(tl.minimum(f2, total - 1), rows, batch, by_rows, by_batch)
        at, other = rows_of_mean(
            projected + at_row(row, entry, row_stride, batch_stride) + channel, head, group, HEADS, GROUPS, D
        )
        if tile < tiles:  # always: see above
            f = tile * BLOCK + tl.arange(0, BLOCK)
            values, exist = late_values(
                projected, value_halo, starts, f, of_value, total, rows, batch, by_rows, by_batch, row_stride,
                batch_stride, HEADS, GROUPS, D, DELAYED, HAS_HALO, HAS_STARTS,
            )
            z, inverse = normalised(
                x, at, other, rope, constant, row, entry, pair, channel, rope_row_stride, rope_batch_stride, head,
                eps, HEADS, GROUPS, D, ROTARY, HAS_ROPE, BLOCK,
            )
            at = out + f2.to(tl.int64) * out_stride + channel
            tl.store(at, (z * length).to(query.dtype.element_ty), mask=f2 < total)
            tl.store(inverse_norm + head * total.to(tl.int64) + f, inverse, mask=f < total)
            tl.store(value + (f.to(tl.int64) * (GROUPS * D))[:, None] + of_value[None, :], values, mask=exist)
