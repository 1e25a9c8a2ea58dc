# SPDX-License-Identifier: Apache-2.0
"""ZAYA1's router behind its down projection in Triton: one kernel forward, two backward, no atomics.

Same formulas and conventions as reference.py. A program computes a tile of rows from the state to the
choice, or back; sums over rows are first taken in each program, then over the programs. Each product keeps its rows in
shared memory and reads the matrix from the cache, a part of its columns at a time, while the next part is loaded. A
part's results go to the result tensors; the next product reads its rows there after a barrier, because no other program
writes them. So registers hold one part, and two programs share a multiprocessor of Hopper.

The second kernel of the backward pass computes the parameters' gradients of a slab of rows, for a tile of each matrix a
program; they are then summed over the slabs.
"""

import triton
import triton.language as tl

INVERSE_SQRT_2_PI = tl.constexpr(0.3989422804014327)
MINUS_HALF_LOG2_E = tl.constexpr(-0.7213475204444817)
# of `normal_cdf`: the fit of log2(erfc(z / sqrt 2) / 2) for z from 0 to 5
COEFFICIENT_0 = tl.constexpr(-0.999998153)
COEFFICIENT_1 = tl.constexpr(-1.15117149)
COEFFICIENT_2 = tl.constexpr(-0.458817921)
COEFFICIENT_3 = tl.constexpr(-0.0533734619)
COEFFICIENT_4 = tl.constexpr(0.00803691882)
COEFFICIENT_5 = tl.constexpr(-0.000727426655)
COEFFICIENT_6 = tl.constexpr(1.34729166e-05)
COEFFICIENT_7 = tl.constexpr(4.06748459e-06)
COEFFICIENT_8 = tl.constexpr(-2.92778186e-07)


@triton.jit
def normal_cdf(x):
    """Return (1 + erf(x / sqrt 2)) / 2 for fp32 x.

    The smaller side is 2^polynomial(|x|), a minimax fit of degree 8. Its relative error is 4e-6 up to 5, where bf16 and
    fp16 round by 2e-3 and 2e-4; beyond 5 the polynomial falls. It takes half of erf's instructions.
    """
    z = tl.abs(x)
    power = COEFFICIENT_8 * z + COEFFICIENT_7
    power = power * z + COEFFICIENT_6
    power = power * z + COEFFICIENT_5
    power = power * z + COEFFICIENT_4
    power = power * z + COEFFICIENT_3
    power = power * z + COEFFICIENT_2
    power = power * z + COEFFICIENT_1
    power = power * z + COEFFICIENT_0
    side = tl.exp2(power)
    return tl.where(x > 0.0, 1.0 - side, side)


@triton.jit
def gelu(x):
    wide = x.to(tl.float32)
    return (wide * normal_cdf(wide)).to(x.dtype)


@triton.jit
def back_through_gelu(grad, x, active, d_hidden, at, live):
    """Write, for the columns `at` of the hidden layer x, gelu(x) to active and its gradient, grad * gelu'(x), to
    d_hidden. grad: of gelu(x).
    """
    wide = x.to(tl.float32)
    cdf = normal_cdf(wide)
    tl.store(active + at, (wide * cdf).to(x.dtype), mask=live)
    slope = cdf + wide * (INVERSE_SQRT_2_PI * tl.exp2(wide * wide * MINUS_HALF_LOG2_E))
    tl.store(d_hidden + at, (grad.to(tl.float32) * slope).to(x.dtype), mask=live)


@triton.jit
def add_three(a, b, c, d, e, f):
    return a + d, b + e, c + f


@triton.jit
def softmax(logits, known):
    """Return the softmax in fp32 over the columns where `known` holds; zeros in the others."""
    wide = tl.where(known, logits.to(tl.float32), float("-inf"))
    raised = tl.exp(wide - tl.max(wide, axis=1)[:, None])
    return raised / tl.sum(raised, axis=1)[:, None]


@triton.jit
def part_of_rows(row, first, R: tl.constexpr, PART: tl.constexpr):
    """Return PART channels from `first` on, and their places in rows of R channels."""
    part = first + tl.arange(0, PART)
    return part, row[:, None] * R + part[None, :]


@triton.jit
def router_mlp_forward_kernel(
    projected, previous, gamma, b_down, w_norm, w1, b1, w2, b2, w_out, biases, forced, state, weights, ids, hidden1,
    hidden2, logits, statistics, rows, eps, unweighted,
    HAS_PREVIOUS: tl.constexpr, HAS_FORCED: tl.constexpr, R: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, PART: tl.constexpr,
):
    """Compute BLOCK tokens. statistics: of this program's tokens. COLUMNS: CLASSES and the padding columns after them.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK
    row, channel = tl.arange(0, BLOCK), tl.arange(0, R)  # places in a tile are 32-bit numbers
    inside = row < rows - start
    live, at = inside[:, None], row[:, None] * R + channel[None, :]
    projected, previous, state = projected + start * R, previous + start * R, state + start * R
    hidden1, hidden2, logits = hidden1 + start * R, hidden2 + start * R, logits + start * COLUMNS
    forced, weights, ids = forced + start, weights + start, ids + start
    wide = tl.load(projected + at, mask=live, other=0.0).to(tl.float32)
    wide += tl.load(b_down + channel).to(tl.float32)[None, :]
    if HAS_PREVIOUS:
        before = tl.load(previous + at, mask=live, other=0.0).to(tl.float32)
        wide += before * tl.load(gamma + channel).to(tl.float32)[None, :]
    rounded = wide.to(state.dtype.element_ty)
    tl.store(state + at, rounded, mask=live)
    wide = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / R + eps)[:, None]
    x = (wide * inverse * tl.load(w_norm + channel).to(tl.float32)[None, :]).to(rounded.dtype)
    for first in range(0, R, PART):
        part, to = part_of_rows(row, first, R, PART)
        y = (
            tl.dot(x, tl.load(w1 + part[None, :] * R + channel[:, None]), input_precision="ieee")
            + tl.load(b1 + part).to(tl.float32)[None, :]
        )
        y = y.to(x.dtype)
        tl.store(hidden1 + to, y, mask=live)
        tl.store(hidden2 + to, gelu(y), mask=live)  # loaded ahead for the next product
    tl.debug_barrier()
    x = tl.load(hidden2 + at, mask=live, other=0.0)
    tl.debug_barrier()
    column = tl.arange(0, COLUMNS)
    known = (column < CLASSES)[None, :]
    scores = tl.zeros((BLOCK, COLUMNS), tl.float32)
    for first in range(0, R, PART):
        part, to = part_of_rows(row, first, R, PART)
        y = (
            tl.dot(x, tl.load(w2 + part[None, :] * R + channel[:, None]), input_precision="ieee")
            + tl.load(b2 + part).to(tl.float32)[None, :]
        )
        y = y.to(x.dtype)
        tl.store(hidden2 + to, y, mask=live)
        matrix = tl.load(w_out + column[None, :] * R + part[:, None], mask=known, other=0.0)
        scores = tl.dot(gelu(y), matrix, scores, input_precision="ieee")
    scores = scores.to(x.dtype)
    tl.store(logits + row[:, None] * COLUMNS + column[None, :], scores, mask=live)
    p = softmax(scores, known)
    biased = p + tl.load(biases + column, mask=column < CLASSES, other=0.0)[None, :]
    biased = tl.where(known, tl.where(biased == biased, biased, float("inf")), float("-inf"))
    best = biased == tl.max(biased, axis=1)[:, None]
    choice = tl.min(tl.where(best, column[None, :], CLASSES - 1), axis=1)
    if HAS_FORCED:
        forced_choice = tl.load(forced + row, mask=inside, other=-1)
        choice = tl.where(forced_choice >= 0, forced_choice.to(tl.int32), choice)
    chosen = column[None, :] == choice[:, None]
    weight = tl.where(choice == unweighted, 0.0, tl.sum(tl.where(chosen, p, 0.0), axis=1))
    tl.store(weights + row, weight, mask=inside)
    tl.store(ids + row, choice.to(tl.int64), mask=inside)
    statistics_at = statistics + tl.program_id(0) * (CLASSES + 1)
    tl.store(statistics_at + column, tl.sum((chosen & live).to(tl.float32), axis=0), mask=column < CLASSES)
    addends = tl.where(live, -p * tl.log(tl.where(p == 0.0, 1.0, p)), 0.0)
    tl.store(statistics_at + CLASSES, tl.sum(tl.sum(addends, axis=1), axis=0))


@triton.jit
def router_mlp_backward_kernel(
    d_weights, d_state, state, previous, gamma, hidden1, hidden2, logits, ids, w_norm, w1, w2, w_out, d_projected,
    d_previous, sums, d_hidden1, normed, d_hidden2, active1, d_logits, active2, rows, eps, unweighted,
    HAS_PREVIOUS: tl.constexpr, HAS_D_STATE: tl.constexpr, R: tl.constexpr, CLASSES: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):
    """Compute BLOCK tokens; sums: this program's of b_down, gamma and w_norm. Rows beyond the last one are zeros."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    row, channel, column = tl.arange(0, BLOCK), tl.arange(0, R), tl.arange(0, COLUMNS)
    inside = row < rows - start
    live, at = inside[:, None], row[:, None] * R + channel[None, :]
    d_state, state, previous = d_state + start * R, state + start * R, previous + start * R
    hidden1, hidden2, d_projected = hidden1 + start * R, hidden2 + start * R, d_projected + start * R
    d_previous, d_hidden1, normed = d_previous + start * R, d_hidden1 + start * R, normed + start * R
    d_hidden2, active1, active2 = d_hidden2 + start * R, active1 + start * R, active2 + start * R
    logits, d_logits = logits + start * COLUMNS, d_logits + start * COLUMNS
    d_weights, ids = d_weights + start, ids + start
    total = sums + tl.program_id(0).to(tl.int64) * 3 * R
    known = (column < CLASSES)[None, :]
    p = softmax(tl.load(logits + row[:, None] * COLUMNS + column[None, :], mask=live, other=0.0), known)
    choice = tl.load(ids + row, mask=inside, other=0).to(tl.int32)
    chosen = column[None, :] == choice[:, None]
    upstream = tl.load(d_weights + row, mask=inside & (choice != unweighted), other=0.0).to(tl.float32)
    upstream *= tl.sum(tl.where(chosen, p, 0.0), axis=1)
    grad = (upstream[:, None] * (tl.where(chosen, 1.0, 0.0) - p)).to(state.dtype.element_ty)
    tl.store(d_logits + row[:, None] * COLUMNS + column[None, :], grad, mask=live)
    _, to = part_of_rows(row, 0, R, PART)
    ahead = tl.load(hidden2 + to, mask=live, other=0.0)
    for first in range(0, R, PART):
        x = ahead
        ahead = tl.load(hidden2 + part_of_rows(row, first + PART, R, PART)[1], mask=live & (first + PART < R), other=0.0)
        part, to = part_of_rows(row, first, R, PART)
        matrix = tl.load(w_out + column[:, None] * R + part[None, :], mask=(column < CLASSES)[:, None], other=0.0)
        back = tl.dot(grad, matrix, input_precision="ieee").to(grad.dtype)
        back_through_gelu(back, x, active2, d_hidden2, to, live)
    tl.debug_barrier()
    grad = tl.load(d_hidden2 + at, mask=live, other=0.0)
    _, to = part_of_rows(row, 0, R, PART)
    ahead = tl.load(hidden1 + to, mask=live, other=0.0)
    for first in range(0, R, PART):
        x = ahead
        ahead = tl.load(hidden1 + part_of_rows(row, first + PART, R, PART)[1], mask=live & (first + PART < R), other=0.0)
        part, to = part_of_rows(row, first, R, PART)
        back = tl.dot(grad, tl.load(w2 + channel[:, None] * R + part[None, :]), input_precision="ieee").to(grad.dtype)
        back_through_gelu(back, x, active1, d_hidden1, to, live)
    tl.debug_barrier()
    grad = tl.load(d_hidden1 + at, mask=live, other=0.0)
    squares, products = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, R, PART):
        part, to = part_of_rows(row, first, R, PART)
        back = tl.dot(grad, tl.load(w1 + channel[:, None] * R + part[None, :]), input_precision="ieee").to(grad.dtype)
        tl.store(d_projected + to, back, mask=live)  # loaded ahead for the loop below
        wide = tl.load(state + to, mask=live, other=0.0).to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        products += tl.sum(back.to(tl.float32) * tl.load(w_norm + part).to(tl.float32)[None, :] * wide, axis=1)
    inverse = tl.rsqrt(squares / R + eps)
    common = (products * inverse / R)[:, None]
    inverse = inverse[:, None]
    tl.debug_barrier()
    for first in range(0, R, PART):
        part, to = part_of_rows(row, first, R, PART)
        direction = tl.load(state + to, mask=live, other=0.0).to(tl.float32) * inverse
        back = tl.load(d_projected + to, mask=live, other=0.0).to(tl.float32)
        scale = tl.load(w_norm + part).to(tl.float32)[None, :]
        wide = inverse * (back * scale - direction * common)
        if HAS_D_STATE:
            wide += tl.load(d_state + to, mask=live, other=0.0).to(tl.float32)
        before = tl.zeros([BLOCK, PART], tl.float32)
        if HAS_PREVIOUS:
            before = tl.load(previous + to, mask=live, other=0.0).to(tl.float32)
            tl.store(d_previous + to, (wide * tl.load(gamma + part).to(tl.float32)[None, :]).to(grad.dtype), mask=live)
        tl.debug_barrier()  # before d_projected is written
        tl.store(d_projected + to, wide.to(grad.dtype), mask=live)
        tl.store(normed + to, (direction * scale).to(grad.dtype), mask=live)
        d_b_down, d_gamma, d_norm = tl.reduce((wide, wide * before, back * direction), 0, add_three)
        tl.store(total + part, d_b_down)
        tl.store(total + R + part, d_gamma)
        tl.store(total + 2 * R + part, d_norm)


@triton.jit
def router_mlp_parameters_kernel(
    d_hidden, inputs, d_logits, active2, sums, slabs, rows,
    R: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):
    """Compute the gradients of a slab of rows: a TILE x TILE tile of w1 or w2, and SLICE columns of all others.

    d_hidden, inputs: [2, rows, R], the two layers' gradients and inputs. sums: of the chain's programs of BLOCK rows.
    slabs: fp32 [slabs, 2 R + CLASSES + 5, R], rows as the gradients of `router_mlp_backward`.
    """
    SIDE: tl.constexpr = R // TILE
    SLICE: tl.constexpr = R // (2 * SIDE * SIDE)
    tile = tl.program_id(1)
    matrix = tile // (SIDE * SIDE)
    out = tile // SIDE % SIDE * TILE + tl.arange(0, TILE)
    into = tile % SIDE * TILE + tl.arange(0, TILE)
    piece, column, one = tile * SLICE + tl.arange(0, SLICE), tl.arange(0, COLUMNS), tl.arange(0, 16)
    vector = tl.arange(0, 4)[:, None]
    blocks = tl.cdiv(rows, BLOCK)
    first = tl.program_id(0).to(tl.int64) * tl.cdiv(blocks, tl.num_programs(0))
    count = tl.minimum(tl.cdiv(blocks, tl.num_programs(0)), blocks - first).to(tl.int32)
    start, end = first * BLOCK, (rows - first * BLOCK).to(tl.int32)
    skipped = (matrix.to(tl.int64) * rows + start) * R
    grad_rows, x_rows = d_hidden + skipped, inputs + skipped
    score_rows, active_rows, sum_rows = d_logits + start * COLUMNS, active2 + start * R, sums + first * 3 * R
    product, d_bias = tl.zeros([TILE, TILE], tl.float32), tl.zeros([TILE, 16], tl.float32)
    d_out, total = tl.zeros([COLUMNS, SLICE], tl.float32), tl.zeros([4, SLICE], tl.float32)
    ahead = tl.load(sum_rows + vector * R + piece[None, :], mask=vector < 3, other=0.0)
    for block in range(0, count):
        row = block * BLOCK + tl.arange(0, BLOCK)[:, None]
        live = row < end
        grad = tl.load(grad_rows + row * R + out[None, :], mask=live, other=0.0)
        x = tl.load(x_rows + row * R + into[None, :], mask=live, other=0.0)
        product = tl.dot(grad.T, x, product, input_precision="ieee")
        d_bias = tl.dot(grad.T, tl.full([BLOCK, 16], 1.0, grad.dtype), d_bias, input_precision="ieee")
        scores = tl.load(score_rows + row * COLUMNS + column[None, :], mask=live, other=0.0)
        active = tl.load(active_rows + row * R + piece[None, :], mask=live, other=0.0)
        d_out = tl.dot(scores.T, active, d_out, input_precision="ieee")
        total += ahead
        following = sum_rows + ((block + 1) * 3 + vector) * R + piece[None, :]
        ahead = tl.load(following, mask=(vector < 3) & (block + 1 < count), other=0.0)
    slab = slabs + tl.program_id(0).to(tl.int64) * (2 * R + CLASSES + 5) * R
    tl.store(slab + (matrix * R + out[:, None]) * R + into[None, :], product)
    others = slab + 2 * R * R
    tl.store(others + column[:, None] * R + piece[None, :], d_out, mask=(column < CLASSES)[:, None])
    tl.store(others + (CLASSES + vector) * R + piece[None, :], total, mask=vector < 3)
    bias = others + (CLASSES + 3 + matrix) * R + out[:, None] + one[None, :]
    tl.store(bias, d_bias, mask=(one[None, :] == 0) & (tile % SIDE == 0))
