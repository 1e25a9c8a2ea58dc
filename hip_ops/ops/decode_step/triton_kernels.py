# SPDX-License-Identifier: Apache-2.0
"""One token of each of a few sequences through a ZAYA1 layer, in eight kernels that read each weight once.

A step waits for memory: a program reads whole rows of a matrix, and the small vectors that all programs need are
computed again by each, because another launch takes longer. Formulas and roundings are those of the operators'
references (rms_norm, cca_prologue, router_mlp, weighted_swiglu), sums are fp32. Of attention, each program reads a part
of the stored tokens; the programs of the output projection join the parts.

Shapes: b sequences, h hidden size, n query heads in g groups, d channels of a head, C = (n + g) d, T places of a cache,
r router width, E experts of width f. BLOCK is a power of two, at least the row length before it. ROWS: of a program.
"""

import triton
import triton.language as tl

EPSILON = tl.constexpr(2.0**-23)  # of fp32
INVERSE_SQRT_2 = tl.constexpr(0.7071067811865476)


@triton.jit
def row_tile(matrix, first, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Load ROWS rows of a matrix [*, WIDTH] from row `first` on as fp32, zeros beyond WIDTH."""
    column = tl.arange(0, BLOCK)[None, :]
    rows = (first + tl.arange(0, ROWS))[:, None] * WIDTH
    return tl.load(matrix + rows + column, mask=column < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def vector(pointer, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load [WIDTH] as fp32 [BLOCK], zeros beyond WIDTH."""
    column = tl.arange(0, BLOCK)
    return tl.load(pointer + column, mask=column < WIDTH, other=0.0).to(tl.float32)


@triton.jit
def times(tile, x):
    """Return the product of a tile [ROWS, BLOCK] and a vector [BLOCK] -> fp32 [ROWS]."""
    return tl.sum(tile * x[None, :], axis=1)


@triton.jit
def merge_project_kernel(
    output, stream, output_bias, output_scale, stream_bias, stream_scale, norm, query, key, current, delayed,
    new_stream, normed, projected, eps, END_QUERY: tl.constexpr, END_KEY: tl.constexpr, END_CURRENT: tl.constexpr,
    END: tl.constexpr, H: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Merge output [b, h] into stream [b, h] and norm it, and apply ROWS rows of four matrices, one below the other:
    query [END_QUERY, h], key to row END_KEY, current to END_CURRENT and delayed to END -> projected [b, END]. The first
    program writes new_stream, which is not `stream`, and normed [b, h].
    """
    place = tl.program_id(0) * ROWS
    if place < END_QUERY:
        matrix = query + place * H
    elif place < END_KEY:
        matrix = key + (place - END_QUERY) * H
    elif place < END_CURRENT:
        matrix = current + (place - END_KEY) * H
    else:
        matrix = delayed + (place - END_CURRENT) * H
    tile = row_tile(matrix, 0, H, ROWS, BLOCK)
    column = tl.arange(0, BLOCK)
    o_scale = vector(output_scale, H, BLOCK)
    s_scale = vector(stream_scale, H, BLOCK)
    shift = vector(output_bias, H, BLOCK) * o_scale + vector(stream_bias, H, BLOCK) * s_scale
    weight = vector(norm, H, BLOCK)
    for row in tl.static_range(BATCH):
        merged = tl.fma(vector(output + row * H, H, BLOCK), o_scale, shift)
        merged = tl.fma(vector(stream + row * H, H, BLOCK), s_scale, merged).to(new_stream.dtype.element_ty)
        wide = merged.to(tl.float32)
        x = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / H + eps) * weight).to(normed.dtype.element_ty)
        if place == 0:
            tl.store(new_stream + row * H + column, merged, mask=column < H)
            tl.store(normed + row * H + column, x, mask=column < H)
        result = times(tile, x.to(tl.float32))
        tl.store(projected + row * END + place + tl.arange(0, ROWS), result.to(projected.dtype.element_ty))


@triton.jit
def prologue_kernel(
    projected, depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, key_scales, rope, positions, z, delayed,
    query, keys, values, places, HEADS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr,
    DELAYED: tl.constexpr, BATCH: tl.constexpr,
):
    """Compute one head of one sequence from projected [b, C + g d] and add the token to its state: z [2, b, C], delayed
    [b, DELAYED], keys and values [b, g, T, d], T = places. rope fp32 [b, ROTARY]; key_scales [g]; query [b, n, d].
    """
    PER: tl.constexpr = HEADS // GROUPS
    C: tl.constexpr = (HEADS + GROUPS) * D
    head, row = tl.program_id(0), tl.program_id(1)
    is_key = head >= HEADS
    group = tl.where(is_key, head - HEADS, head // PER)
    pair = tl.arange(0, D // 2)
    turns = pair < ROTARY // 2
    first = pair + tl.where(turns, 0, ROTARY // 2)  # channels behind ROTARY do not turn; half of them in each
    second = first + tl.where(turns, ROTARY // 2, (D - ROTARY) // 2)
    taps = tl.arange(0, 2 * D)[None, :]  # channels of the head, both taps of each
    matrix = grouped_weight + head * (2 * D * D)
    first_rows = tl.load(matrix + first[:, None] * (2 * D) + taps).to(tl.float32)
    second_rows = tl.load(matrix + second[:, None] * (2 * D) + taps).to(tl.float32)

    own = head * D + tl.arange(0, D)
    at0 = projected + row * (C + GROUPS * D)
    at1 = z + (BATCH + row) * C
    at2 = z + row * C
    z0, z1 = tl.load(at0 + own), tl.load(at1 + own)
    near, far = z1.to(tl.float32), tl.load(at2 + own).to(tl.float32)
    a0 = tl.load(depthwise_weight + 2 * own).to(tl.float32)
    a1 = tl.load(depthwise_weight + 2 * own + 1).to(tl.float32)
    b0 = tl.load(depthwise_bias + own).to(tl.float32)
    u_before = tl.fma(a0, far, tl.fma(a1, near, b0)).to(z0.dtype)
    u_now = tl.fma(a0, near, tl.fma(a1, z0.to(tl.float32), b0)).to(z0.dtype)
    u = tl.reshape(tl.join(u_before, u_now), (2 * D,)).to(tl.float32)

    bias = grouped_bias + head * D
    x_first = tl.load(bias + first).to(tl.float32) + 0.5 * tl.load(at0 + head * D + first).to(tl.float32)
    x_second = tl.load(bias + second).to(tl.float32) + 0.5 * tl.load(at0 + head * D + second).to(tl.float32)
    # Of a query head the group's key, of a key head the mean of the group's queries.
    others = at0 + tl.where(is_key, group * PER, HEADS + group) * D
    share = tl.where(is_key, 0.5 / PER, 0.5)
    for i in range(tl.where(is_key, PER, 1)):
        x_first += share * tl.load(others + i * D + first).to(tl.float32)
        x_second += share * tl.load(others + i * D + second).to(tl.float32)
    x_first += times(first_rows, u)
    x_second += times(second_rows, u)
    inverse = tl.rsqrt(tl.maximum(tl.sum(x_first * x_first + x_second * x_second, axis=0), EPSILON * EPSILON))
    length = tl.where(is_key, tl.load(key_scales + group).to(tl.float32), 1.0) * inverse * tl.sqrt(D * 1.0)
    cos = tl.load(rope + row * ROTARY + pair, mask=turns, other=1.0) * length
    sin = tl.load(rope + row * ROTARY + ROTARY // 2 + pair, mask=turns, other=0.0) * length
    place = tl.load(positions + row) % places
    cached = ((row * GROUPS + group) * places + place) * D
    if is_key:
        out = keys + cached
    else:
        out = query + (row * HEADS + head) * D
    tl.store(out + first, (x_first * cos - x_second * sin).to(z0.dtype))
    tl.store(out + second, (x_second * cos + x_first * sin).to(z0.dtype))

    channel = group * D + tl.arange(0, D) - (GROUPS * D - DELAYED)  # negative: of the current values
    late = is_key & (channel >= 0)
    before = tl.load(delayed + row * DELAYED + channel, mask=late, other=0.0)
    now = tl.load(at0 + C + group * D + tl.arange(0, D))
    tl.debug_barrier()  # the state is read
    tl.store(at2 + own, z1)
    tl.store(at1 + own, z0)
    if is_key:
        tl.store(values + cached + tl.arange(0, D), tl.where(late, before, now))
    tl.store(delayed + row * DELAYED + channel, now, mask=late)


@triton.jit
def attend_kernel(
    query, keys, values, positions, tops, totals, parts, scale, places, GROUPS: tl.constexpr, PER: tl.constexpr,
    D: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):
    """Let a group's PER query heads of one sequence attend to one of SPLITS parts of its stored tokens.

    Writes for each head the largest score of the part, the sum of exp(score - largest), fp32 [b, SPLITS, n], and the
    sum of the values with these weights [b, SPLITS, n, d]. ROWS >= PER as tl.dot requires. A ring that was passed holds
    tokens of the window alone.
    """
    split, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.minimum(tl.load(positions + row) + 1, places).to(tl.int32)
    blocks = tl.cdiv(count, BLOCK)
    head, channel = tl.arange(0, ROWS), tl.arange(0, D)
    real = head < PER
    at = (row * GROUPS + group) * PER + head
    q = tl.load(query + at[:, None] * D + channel[None, :], mask=real[:, None], other=0.0)
    cache = (row * GROUPS + group).to(tl.int64) * places * D
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    part = tl.zeros([ROWS, D], tl.float32)
    for block in range(split * blocks // SPLITS, (split + 1) * blocks // SPLITS):
        place = block * BLOCK + tl.arange(0, BLOCK)
        live = place < count
        k = tl.load(keys + cache + place[None, :] * D + channel[:, None], mask=live[None, :], other=0.0)
        v = tl.load(values + cache + place[:, None] * D + channel[None, :], mask=live[:, None], other=0.0)
        scores = tl.where(live[None, :], tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
        new = tl.maximum(top, tl.max(scores, axis=1))
        shares, kept = tl.exp(scores - new[:, None]), tl.exp(top - new)
        total = total * kept + tl.sum(shares, axis=1)
        part = tl.dot(shares.to(v.dtype), v, part * kept[:, None], input_precision="ieee")
        top = new
    at = (row * SPLITS + split) * (GROUPS * PER) + group * PER + head
    tl.store(tops + at, top, mask=real)
    tl.store(totals + at, total, mask=real)
    tl.store(parts + at[:, None] * D + channel[None, :], part.to(parts.dtype.element_ty), mask=real[:, None])


@triton.jit
def output_kernel(
    tops, totals, parts, matrix, output, H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    BATCH: tl.constexpr, ROWS: tl.constexpr,
):
    """Join the parts of `attend_kernel` and apply ROWS rows of matrix [h, n d] -> output [b, h]."""
    first = tl.program_id(0) * ROWS
    tile = row_tile(matrix, first, HEADS * D, ROWS, HEADS * D)
    split, head, channel = tl.arange(0, SPLITS)[:, None], tl.arange(0, HEADS)[None, :], tl.arange(0, D)
    for row in tl.static_range(BATCH):
        at = (row * SPLITS + split) * HEADS + head
        part = tl.load(parts + at[:, :, None] * D + channel[None, None, :]).to(tl.float32)
        top = tl.load(tops + at)
        share = tl.exp(top - tl.max(top, axis=0)[None, :])
        share = share / tl.sum(share * tl.load(totals + at), axis=0)[None, :]
        attended = tl.reshape(tl.sum(part * share[:, :, None], axis=0), (HEADS * D,))
        result = times(tile, attended.to(parts.dtype.element_ty).to(tl.float32))
        tl.store(output + row * H + first + tl.arange(0, ROWS), result.to(output.dtype.element_ty))


@triton.jit
def whole(matrix, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PADDED: tl.constexpr):
    """Load a matrix [ROWS, WIDTH] as fp32 [PADDED, BLOCK], zeros beyond."""
    out, column = tl.arange(0, PADDED)[:, None], tl.arange(0, BLOCK)[None, :]
    inside = (out < ROWS) & (column < WIDTH)
    return tl.load(matrix + out * WIDTH + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def gelu(x):
    """Return the exact GELU in x's dtype."""
    wide = x.to(tl.float32)
    return (0.5 * wide * (1.0 + tl.erf(wide * INVERSE_SQRT_2))).to(x.dtype)


@triton.jit
def route_kernel(
    projected, state, gamma, b_down, w_norm, w1, b1, w2, b2, w_out, biases, weights, ids, eps, unweighted,
    R: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Route one token as router_mlp/reference.py: projected [b, r] -> weights fp32 [b], ids int32 [b]. state [b, r] is
    the previous layer's, read unless gamma is None, and then this layer's.
    """
    row = tl.program_id(0)
    channel, column = tl.arange(0, BLOCK), tl.arange(0, COLUMNS)
    dtype = state.dtype.element_ty
    tile = whole(w1, R, R, BLOCK, BLOCK)
    wide = vector(projected + row * R, R, BLOCK) + vector(b_down, R, BLOCK)
    if gamma is not None:
        wide = tl.fma(vector(state + row * R, R, BLOCK), vector(gamma, R, BLOCK), wide)
    new = wide.to(dtype)
    tl.debug_barrier()  # the previous state is read
    tl.store(state + row * R + channel, new, mask=channel < R)
    wide = new.to(tl.float32)
    x = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / R + eps) * vector(w_norm, R, BLOCK)).to(dtype)
    x = gelu((times(tile, x.to(tl.float32)) + vector(b1, R, BLOCK)).to(dtype))
    x = gelu((times(whole(w2, R, R, BLOCK, BLOCK), x.to(tl.float32)) + vector(b2, R, BLOCK)).to(dtype))
    known = column < CLASSES
    logits = times(whole(w_out, R, CLASSES, BLOCK, COLUMNS), x.to(tl.float32)).to(dtype)
    raised = tl.where(known, logits.to(tl.float32), float("-inf"))
    raised = tl.exp(raised - tl.max(raised, axis=0))
    p = raised / tl.sum(raised, axis=0)
    biased = p + tl.load(biases + column, mask=known, other=0.0)
    biased = tl.where(known, tl.where(biased == biased, biased, float("inf")), float("-inf"))
    choice = tl.min(tl.where(biased == tl.max(biased, axis=0), column, CLASSES - 1), axis=0)
    weight = tl.sum(tl.where(column == choice, p, 0.0), axis=0)
    tl.store(weights + row, tl.where(choice == unweighted, 0.0, weight))
    tl.store(ids + row, choice)


@triton.jit
def expert_input_kernel(
    normed, weights, ids, matrices, hidden, EXPERTS: tl.constexpr, H: tl.constexpr, F: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute ROWS channels of swiglu(W1_e x) * weight of one token's expert e: normed [b, h], matrices [E, 2 f, h] ->
    hidden [b, f]; nothing where e is the skip class E.
    """
    row, first = tl.program_id(1), tl.program_id(0) * ROWS
    expert = tl.load(ids + row)
    if expert < EXPERTS:
        matrix = matrices + expert.to(tl.int64) * (2 * F * H)
        gate_rows, up_rows = row_tile(matrix, first, H, ROWS, BLOCK), row_tile(matrix, F + first, H, ROWS, BLOCK)
        x = vector(normed + row * H, H, BLOCK)
        dtype = hidden.dtype.element_ty
        gate, up = times(gate_rows, x).to(dtype).to(tl.float32), times(up_rows, x).to(dtype).to(tl.float32)
        result = gate / (1.0 + tl.exp(-gate)) * up * tl.load(weights + row)
        tl.store(hidden + row * F + first + tl.arange(0, ROWS), result.to(dtype))


@triton.jit
def expert_output_kernel(
    normed, hidden, weights, ids, matrices, output, EXPERTS: tl.constexpr, H: tl.constexpr, F: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute ROWS channels of W2_e hidden of one token's expert e: hidden [b, f], matrices [E, h, f] -> output [b, h].
    A token of the skip class E gets normed [b, h] times its weight, which is 0 where the class gives nothing.
    """
    row, first = tl.program_id(1), tl.program_id(0) * ROWS
    expert, at = tl.load(ids + row), row * H + first + tl.arange(0, ROWS)
    if expert < EXPERTS:
        tile = row_tile(matrices + expert.to(tl.int64) * (H * F), first, F, ROWS, BLOCK)
        result = times(tile, vector(hidden + row * F, F, BLOCK))
    else:
        result = tl.load(normed + at).to(tl.float32) * tl.load(weights + row)
    tl.store(output + at, result.to(output.dtype.element_ty))
