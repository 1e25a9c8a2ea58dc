# SPDX-License-Identifier: Apache-2.0
"""One token of each of a few sequences through a ZAYA1 layer, in nine kernels that read each weight once for one sequence.

A step waits for memory: a program reads whole rows of a matrix, and the small vectors that all programs need are
computed again by each, because another launch takes longer. Formulas and roundings are those of the operators'
references (rms_norm, cca_prologue, router_mlp, weighted_swiglu), sums are fp32. Of attention, each program reads a part
of the stored tokens; the programs of the output projection join the parts.

OVERLAP, on NVIDIA from Hopper on: a kernel starts while the one before it ends (programmatic dependent launch). Before
`wait` a program reads weights, states of earlier steps and, past its own cache, what kernels of this step before the
previous one have written; it writes nothing. What torch's kernels wrote at the start of the step (positions, angles) is
complete by then.

Shapes: b sequences, h hidden size, n query heads in g groups, d channels of a head, C = (n + g) d, T places of a cache,
r router width, E experts of width f. BLOCK is a power of two, at least the row length before it. ROWS: of a program.
"""

import triton
import triton.language as tl

EPSILON = tl.constexpr(2.0**-23)  # of fp32
NO_SUM = tl.constexpr(-1e30)  # the logarithm of no sum
ALL_CACHES = tl.constexpr("")  # Triton 3.6 takes no bare string as the default of a function called by a kernel
INVERSE_SQRT_2 = tl.constexpr(0.7071067811865476)


@triton.jit
def wait(OVERLAP: tl.constexpr):
    """Wait until the kernel before has ended, and let the next one start once all programs are at this point."""
    if OVERLAP:
        tl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1)
        tl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def row_tile(matrix, first, WIDTH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Load ROWS rows of a matrix [*, WIDTH] from row `first` on, zeros beyond WIDTH."""
    column = tl.arange(0, BLOCK)[None, :]
    rows = (first + tl.arange(0, ROWS))[:, None] * WIDTH
    return tl.load(matrix + rows + column, mask=column < WIDTH, other=0.0)


@triton.jit
def vector(pointer, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CACHE: tl.constexpr = ALL_CACHES):
    """Load [WIDTH] as fp32 [BLOCK], zeros beyond WIDTH. CACHE=".cg" before `wait` for what this step has written: the
    first-level cache may hold an older value.
    """
    column = tl.arange(0, BLOCK)
    return tl.load(pointer + column, mask=column < WIDTH, other=0.0, cache_modifier=CACHE).to(tl.float32)


@triton.jit
def times(tile, x):
    """Return the product of a tile [ROWS, BLOCK] and a vector [BLOCK] -> fp32 [ROWS]."""
    return tl.sum(tile.to(tl.float32) * x[None, :], axis=1)


@triton.jit
def merge_project_kernel(
    output, stream, output_bias, output_scale, stream_bias, stream_scale, norm, query, key, current, delayed,
    new_stream, normed, projected, eps, END_QUERY: tl.constexpr, END_KEY: tl.constexpr, END_CURRENT: tl.constexpr,
    END: tl.constexpr, H: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
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
    wait(OVERLAP)
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
    DELAYED: tl.constexpr, BATCH: tl.constexpr, OVERLAP: tl.constexpr,
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
    first_rows = tl.load(matrix + first[:, None] * (2 * D) + taps)
    second_rows = tl.load(matrix + second[:, None] * (2 * D) + taps)

    own = head * D + tl.arange(0, D)
    at0 = projected + row * (C + GROUPS * D)
    at1 = z + (BATCH + row) * C
    at2 = z + row * C
    z1 = tl.load(at1 + own)
    near, far = z1.to(tl.float32), tl.load(at2 + own).to(tl.float32)
    a0 = tl.load(depthwise_weight + 2 * own).to(tl.float32)
    a1 = tl.load(depthwise_weight + 2 * own + 1).to(tl.float32)
    b0 = tl.load(depthwise_bias + own).to(tl.float32)
    bias = grouped_bias + head * D
    x_first, x_second = tl.load(bias + first).to(tl.float32), tl.load(bias + second).to(tl.float32)
    key_scale = tl.where(is_key, tl.load(key_scales + group).to(tl.float32), 1.0)
    cos = tl.load(rope + row * ROTARY + pair, mask=turns, other=1.0)
    sin = tl.load(rope + row * ROTARY + ROTARY // 2 + pair, mask=turns, other=0.0)
    place = tl.load(positions + row) % places
    cached = ((row * GROUPS + group) * places + place) * D
    channel = group * D + tl.arange(0, D) - (GROUPS * D - DELAYED)  # negative: of the current values
    late = is_key & (channel >= 0)
    before = tl.load(delayed + row * DELAYED + channel, mask=late, other=0.0)
    wait(OVERLAP)

    z0 = tl.load(at0 + own)
    u_before = tl.fma(a0, far, tl.fma(a1, near, b0)).to(z0.dtype)
    u_now = tl.fma(a0, near, tl.fma(a1, z0.to(tl.float32), b0)).to(z0.dtype)
    u = tl.reshape(tl.join(u_before, u_now), (2 * D,)).to(tl.float32)

    x_first += 0.5 * tl.load(at0 + head * D + first).to(tl.float32)
    x_second += 0.5 * tl.load(at0 + head * D + second).to(tl.float32)
    # Of a query head the group's key, of a key head the mean of the group's queries.
    others = at0 + tl.where(is_key, group * PER, HEADS + group) * D
    share = tl.where(is_key, 0.5 / PER, 0.5)
    for i in range(tl.where(is_key, PER, 1)):
        x_first += share * tl.load(others + i * D + first).to(tl.float32)
        x_second += share * tl.load(others + i * D + second).to(tl.float32)
    x_first += times(first_rows, u)
    x_second += times(second_rows, u)
    inverse = tl.rsqrt(tl.maximum(tl.sum(x_first * x_first + x_second * x_second, axis=0), EPSILON * EPSILON))
    length = key_scale * inverse * tl.sqrt(D * 1.0)
    cos, sin = cos * length, sin * length
    if is_key:
        out = keys + cached
    else:
        out = query + (row * HEADS + head) * D
    tl.store(out + first, (x_first * cos - x_second * sin).to(z0.dtype))
    tl.store(out + second, (x_second * cos + x_first * sin).to(z0.dtype))

    now = tl.load(at0 + C + group * D + tl.arange(0, D))
    tl.debug_barrier()  # the state is read
    tl.store(at2 + own, z1)
    tl.store(at1 + own, z0)
    if is_key:
        tl.store(values + cached + tl.arange(0, D), tl.where(late, before, now))
    tl.store(delayed + row * DELAYED + channel, now, mask=late)


@triton.jit
def attend_kernel(
    query, keys, values, positions, log_sums, parts, scale, places, GROUPS: tl.constexpr, PER: tl.constexpr,
    D: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Let a group's PER query heads of one sequence attend to one of SPLITS parts of its stored tokens, the last of
    which is the newest token alone: the kernel before has written it.

    Writes for each head the logarithm of the sum of exp(score) of the part, fp32 [b, SPLITS, n], NO_SUM without tokens, and
    the mean of the values with these weights [b, SPLITS, n, d]. ROWS >= PER as tl.dot requires. A ring that was passed
    holds tokens of the window alone. In one stage, or the query would be read before the wait.
    """
    split, group, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    position = tl.load(positions + row)
    count, newest = tl.minimum(position + 1, places).to(tl.int32), (position % places).to(tl.int32)
    head, channel = tl.arange(0, ROWS), tl.arange(0, D)
    real = head < PER
    queries = query + ((row * GROUPS + group) * PER + head)[:, None] * D + channel[None, :]
    cache = (row * GROUPS + group).to(tl.int64) * places * D
    at = (row * SPLITS + split) * (GROUPS * PER) + group * PER + head
    log_sums, parts = log_sums + at, parts + at[:, None] * D + channel[None, :]
    if split == SPLITS - 1:
        wait(OVERLAP)
        q = tl.load(queries, mask=real[:, None], other=0.0).to(tl.float32)
        score = tl.sum(q * tl.load(keys + cache + newest * D + channel).to(tl.float32)[None, :], axis=1) * scale
        value = tl.load(values + cache + newest * D + channel)
        tl.store(log_sums, score, mask=real)
        tl.store(parts, tl.broadcast_to(value[None, :], (ROWS, D)), mask=real[:, None])
    else:
        blocks = tl.cdiv(count, BLOCK)
        top = tl.full([ROWS], NO_SUM, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        part = tl.zeros([ROWS, D], tl.float32)
        for block in range(split * blocks // (SPLITS - 1), (split + 1) * blocks // (SPLITS - 1)):
            place = block * BLOCK + tl.arange(0, BLOCK)
            live = (place < count) & (place != newest)
            k = tl.load(keys + cache + place[None, :] * D + channel[:, None], mask=live[None, :], other=0.0)
            v = tl.load(values + cache + place[:, None] * D + channel[None, :], mask=live[:, None], other=0.0)
            wait(OVERLAP)
            q = tl.load(queries, mask=real[:, None], other=0.0)
            scores = tl.where(live[None, :], tl.dot(q, k, input_precision="ieee") * scale, float("-inf"))
            new = tl.maximum(top, tl.max(scores, axis=1))
            shares, kept = tl.exp(scores - new[:, None]), tl.exp(top - new)
            total = total * kept + tl.sum(shares, axis=1)
            part = tl.dot(shares.to(v.dtype), v, part * kept[:, None], input_precision="ieee")
            top = new
        wait(OVERLAP)
        some = tl.maximum(total, 1e-30)
        tl.store(log_sums, top + tl.log(some), mask=real)
        tl.store(parts, (part / some[:, None]).to(parts.dtype.element_ty), mask=real[:, None])


@triton.jit
def output_kernel(
    log_sums, parts, matrix, output, H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, SPLITS: tl.constexpr,
    BATCH: tl.constexpr, ROWS: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Join the parts of `attend_kernel` and apply ROWS rows of matrix [h, n d] -> output [b, h]."""
    first = tl.program_id(0) * ROWS
    tile = row_tile(matrix, first, HEADS * D, ROWS, HEADS * D)
    head = tl.arange(0, HEADS)
    place = head[:, None] * D + tl.arange(0, D)[None, :]
    wait(OVERLAP)
    for row in tl.static_range(BATCH):
        log_sum = log_sums + row * SPLITS * HEADS + head
        part = parts + row * SPLITS * HEADS * D + place
        top, total = tl.full([HEADS], NO_SUM, tl.float32), tl.zeros([HEADS], tl.float32)
        attended = tl.zeros([HEADS, D], tl.float32)
        for split in tl.static_range(SPLITS):
            top = tl.maximum(top, tl.load(log_sum + split * HEADS))
        for split in tl.static_range(SPLITS):
            share = tl.exp(tl.load(log_sum + split * HEADS) - top)
            total += share
            attended += tl.load(part + split * HEADS * D).to(tl.float32) * share[:, None]
        attended = tl.reshape(attended / total[:, None], (HEADS * D,)).to(parts.dtype.element_ty)
        result = times(tile, attended.to(tl.float32))
        tl.store(output + row * H + first + tl.arange(0, ROWS), result.to(output.dtype.element_ty))


@triton.jit
def gelu(x):
    """Return the exact GELU in x's dtype."""
    wide = x.to(tl.float32)
    return (0.5 * wide * (1.0 + tl.erf(wide * INVERSE_SQRT_2))).to(x.dtype)


@triton.jit
def router_first_kernel(
    projected, old_state, new_state, gamma, b_down, norm, matrix, bias, hidden, eps,
    R: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Compute ROWS channels of the router's first layer: projected [b, r] -> hidden [b, r]. old_state [b, r] is the
    previous layer's, read unless gamma is None; the first program writes this layer's.
    """
    place, channel = tl.program_id(0) * ROWS, tl.arange(0, BLOCK)
    dtype = new_state.dtype.element_ty
    tile, own = row_tile(matrix, place, R, ROWS, BLOCK), place + tl.arange(0, ROWS)
    weight, shift = vector(norm, R, BLOCK), tl.load(bias + own).to(tl.float32)
    wait(OVERLAP)
    for row in tl.static_range(BATCH):
        wide = vector(projected + row * R, R, BLOCK) + vector(b_down, R, BLOCK)
        if gamma is not None:
            wide = tl.fma(vector(old_state + row * R, R, BLOCK), vector(gamma, R, BLOCK), wide)
        new = wide.to(dtype)
        if place == 0:
            tl.store(new_state + row * R + channel, new, mask=channel < R)
        wide = new.to(tl.float32)
        x = (wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / R + eps) * weight).to(dtype)
        tl.store(hidden + row * R + own, gelu((times(tile, x.to(tl.float32)) + shift).to(dtype)))


@triton.jit
def router_second_kernel(
    x, matrix, bias, hidden, R: tl.constexpr, BATCH: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Compute ROWS channels of the router's second layer: x [b, r] -> hidden [b, r]."""
    own = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tile, shift = row_tile(matrix, tl.program_id(0) * ROWS, R, ROWS, BLOCK), tl.load(bias + own).to(tl.float32)
    wait(OVERLAP)
    for row in tl.static_range(BATCH):
        result = times(tile, vector(x + row * R, R, BLOCK)) + shift
        tl.store(hidden + row * R + own, gelu(result.to(hidden.dtype.element_ty)))


@triton.jit
def router_matrix(matrix, R: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr):
    """Load the router's last matrix [CLASSES, R] as [COLUMNS, BLOCK], zeros beyond."""
    out, column = tl.arange(0, COLUMNS)[:, None], tl.arange(0, BLOCK)[None, :]
    return tl.load(matrix + out * R + column, mask=(out < CLASSES) & (column < R), other=0.0)


@triton.jit
def more_terms(top, total, other_top, other_total):
    """Join two sums of exponentials, each relative to its largest exponent."""
    new = tl.maximum(top, other_top)
    return new, total * tl.exp(top - new) + other_total * tl.exp(other_top - new)


@triton.jit
def better(biased, column, p, other_biased, other_column, other_p):
    """Keep the larger first number, of equal ones the smaller column."""
    kept = (biased > other_biased) | ((biased == other_biased) & (column < other_column))
    return tl.where(kept, biased, other_biased), tl.where(kept, column, other_column), tl.where(kept, p, other_p)


@triton.jit
def chosen(x, tile, biases, SKIP: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr):
    """Choose as router_mlp/reference.py: x fp32 [BLOCK] of the router's second layer, tile of `router_matrix`, biases
    fp32 [CLASSES] -> the class, and its weight, 0 for class SKIP. Two kernels
    choose for themselves, so both must have this function's order of operations.
    """
    column = tl.arange(0, COLUMNS)
    known = column < CLASSES
    bias = tl.load(biases + column, mask=known, other=0.0)
    logits = tl.where(known, times(tile, x).to(tile.dtype).to(tl.float32), NO_SUM)
    top, total = tl.reduce((logits, tl.full([COLUMNS], 1.0, tl.float32)), 0, more_terms)
    p = tl.exp(logits - top) / total
    biased = p + bias
    biased = tl.where(known, tl.where(biased == biased, biased, float("inf")), float("-inf"))
    _, choice, weight = tl.reduce((biased, column, p), 0, better)
    return choice, tl.where(choice == SKIP, 0.0, weight)


@triton.jit
def expert_input_kernel(
    normed, routed, w_out, biases, matrices, hidden, EXPERTS: tl.constexpr, SKIP: tl.constexpr, CLASSES: tl.constexpr,
    COLUMNS: tl.constexpr, R: tl.constexpr, H: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
    ROUTER_BLOCK: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Choose one token's expert e by routed [b, r] and compute ROWS channels of swiglu(W1_e x) * weight: normed [b, h],
    matrices [E, 2 f, h] -> hidden [b, f]; nothing where e is the skip class E.
    """
    row, first = tl.program_id(1), tl.program_id(0) * ROWS
    tile = router_matrix(w_out, R, CLASSES, COLUMNS, ROUTER_BLOCK)
    x = vector(normed + row * H, H, BLOCK, ".cg")
    wait(OVERLAP)
    expert, weight = chosen(vector(routed + row * R, R, ROUTER_BLOCK), tile, biases, SKIP, CLASSES, COLUMNS)
    if expert < EXPERTS:
        matrix = matrices + expert.to(tl.int64) * (2 * F * H)
        gate_rows, up_rows = row_tile(matrix, first, H, ROWS, BLOCK), row_tile(matrix, F + first, H, ROWS, BLOCK)
        dtype = hidden.dtype.element_ty
        gate, up = times(gate_rows, x).to(dtype).to(tl.float32), times(up_rows, x).to(dtype).to(tl.float32)
        result = gate / (1.0 + tl.exp(-gate)) * up * weight
        tl.store(hidden + row * F + first + tl.arange(0, ROWS), result.to(dtype))


@triton.jit
def expert_output_kernel(
    normed, routed, w_out, biases, hidden, matrices, output, EXPERTS: tl.constexpr, SKIP: tl.constexpr,
    CLASSES: tl.constexpr, COLUMNS: tl.constexpr, R: tl.constexpr, H: tl.constexpr, F: tl.constexpr, ROWS: tl.constexpr,
    ROUTER_BLOCK: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):
    """Choose as `expert_input_kernel` and compute ROWS channels of W2_e hidden: hidden [b, f], matrices [E, h, f] ->
    output [b, h]. A token of the skip class E gets normed [b, h] times its weight, which is 0 where the class gives
    nothing.
    """
    row, first = tl.program_id(1), tl.program_id(0) * ROWS
    at = row * H + first + tl.arange(0, ROWS)
    tile = router_matrix(w_out, R, CLASSES, COLUMNS, ROUTER_BLOCK)
    x = vector(routed + row * R, R, ROUTER_BLOCK, ".cg")
    expert, weight = chosen(x, tile, biases, SKIP, CLASSES, COLUMNS)
    if expert < EXPERTS:
        rows = row_tile(matrices + expert.to(tl.int64) * (H * F), first, F, ROWS, BLOCK)
        wait(OVERLAP)
        result = times(rows, vector(hidden + row * F, F, BLOCK))
    else:
        wait(OVERLAP)
        result = tl.load(normed + at).to(tl.float32) * weight
    tl.store(output + at, result.to(output.dtype.element_ty))
