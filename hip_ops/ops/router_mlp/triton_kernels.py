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


@triton.jit
def normal_cdf(x):
    """Return (1 + erf(x / sqrt 2)) / 2 for fp32 x.

    The smaller side is 2^polynomial(|x|), the minimax fit of log2(erfc(z / sqrt 2) / 2) of degree 8. Its relative error is
    4e-6 up to 5, where bf16 and fp16 round by 2e-3 and 2e-4; beyond 5 the polynomial falls. It takes half of erf's
    instructions.
    """
    z = tl.abs(x)
    power = (((-2.92778186e-07 * z + 4.06748459e-06) * z + 1.34729166e-05) * z - 0.000727426655) * z + 0.00803691882
    side = tl.exp2((((power * z - 0.0533734619) * z - 0.458817921) * z - 1.15117149) * z - 0.999998153)
    return tl.where(x > 0.0, 1.0 - side, side)


@triton.jit
def gelu(x):
    wide = x.to(tl.float32)
    return (wide * normal_cdf(wide)).to(x.dtype)


@triton.jit
def back_through_gelu(
    grad, matrix, hidden, active, d_hidden, to, live, KNOWN: tl.constexpr, R: tl.constexpr, PART: tl.constexpr
):
    """Write gelu(hidden) to active, and the gradient of hidden to d_hidden. grad: of gelu(hidden) times a matrix
    [KNOWN, R]. to: places of the rows' first PART channels. The next part of hidden is loaded before a part's product.
    """
    inner, lane = tl.arange(0, grad.shape[1])[:, None], tl.arange(0, PART)[None, :]
    ahead = tl.load(hidden + to, mask=live, other=0.0)
    for first in range(0, R, PART):
        wide = ahead.to(tl.float32)
        ahead = tl.load(hidden + first + PART + to, mask=live & (first + PART < R), other=0.0)
        part = tl.load(matrix + first + inner * R + lane, mask=inner < KNOWN, other=0.0)
        back = tl.dot(grad, part, input_precision="ieee").to(grad.dtype).to(tl.float32)
        cdf = normal_cdf(wide)
        slope = cdf + wide * (INVERSE_SQRT_2_PI * tl.exp2(wide * wide * MINUS_HALF_LOG2_E))
        tl.store(active + first + to, (wide * cdf).to(grad.dtype), mask=live)
        tl.store(d_hidden + first + to, (back * slope).to(grad.dtype), mask=live)


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
def router_mlp_forward_kernel(
    projected, previous, gamma, b_down, w_norm, w1, b1, w2, b2, w_out, biases, forced, state, weights, ids, hidden1,
    hidden2, logits, statistics, rows, eps, unweighted,
    HAS_PREVIOUS: tl.constexpr, HAS_FORCED: tl.constexpr, R: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, PART: tl.constexpr,
):
    """Compute BLOCK tokens. statistics: of this program's tokens. COLUMNS: CLASSES and the padding columns after them.
    """
    start = tl.program_id(0).to(tl.int64) * BLOCK  # so that places in a tile are 32-bit numbers
    row, channel, lane, column = tl.arange(0, BLOCK), tl.arange(0, R), tl.arange(0, PART), tl.arange(0, COLUMNS)
    inside, known = row < rows - start, (column < CLASSES)[None, :]
    live, at, to = inside[:, None], row[:, None] * R + channel[None, :], row[:, None] * R + lane[None, :]
    state, hidden1, hidden2 = state + start * R, hidden1 + start * R, hidden2 + start * R
    wide = tl.load(projected + start * R + at, mask=live, other=0.0).to(tl.float32)
    wide += tl.load(b_down + channel).to(tl.float32)[None, :]
    if HAS_PREVIOUS:
        before = tl.load(previous + start * R + at, mask=live, other=0.0).to(tl.float32)
        wide += before * tl.load(gamma + channel).to(tl.float32)[None, :]
    rounded = wide.to(state.dtype.element_ty)
    tl.store(state + at, rounded, mask=live)
    wide = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(wide * wide, axis=1) / R + eps)[:, None]
    x = (wide * inverse * tl.load(w_norm + channel).to(tl.float32)[None, :]).to(rounded.dtype)
    for first in range(0, R, PART):
        y = tl.dot(x, tl.load(w1 + first * R + lane[None, :] * R + channel[:, None]), input_precision="ieee")
        y = (y + tl.load(b1 + first + lane).to(tl.float32)[None, :]).to(x.dtype)
        tl.store(hidden1 + first + to, y, mask=live)
        tl.store(hidden2 + first + to, gelu(y), mask=live)  # loaded ahead for the next product
    tl.debug_barrier()
    x = tl.load(hidden2 + at, mask=live, other=0.0)
    tl.debug_barrier()
    scores = tl.zeros((BLOCK, COLUMNS), tl.float32)
    for first in range(0, R, PART):
        y = tl.dot(x, tl.load(w2 + first * R + lane[None, :] * R + channel[:, None]), input_precision="ieee")
        y = (y + tl.load(b2 + first + lane).to(tl.float32)[None, :]).to(x.dtype)
        tl.store(hidden2 + first + to, y, mask=live)
        matrix = tl.load(w_out + first + column[None, :] * R + lane[:, None], mask=known, other=0.0)
        scores = tl.dot(gelu(y), matrix, scores, input_precision="ieee")
    scores = scores.to(x.dtype)
    tl.store(logits + start * COLUMNS + row[:, None] * COLUMNS + column[None, :], scores, mask=live)
    p = softmax(scores, known)
    biased = p + tl.load(biases + column, mask=column < CLASSES, other=0.0)[None, :]
    biased = tl.where(known, tl.where(biased == biased, biased, float("inf")), float("-inf"))
    best = biased == tl.max(biased, axis=1)[:, None]
    choice = tl.min(tl.where(best, column[None, :], CLASSES - 1), axis=1)
    if HAS_FORCED:
        forced_choice = tl.load(forced + start + row, mask=inside, other=-1)
        choice = tl.where(forced_choice >= 0, forced_choice.to(tl.int32), choice)
    chosen = column[None, :] == choice[:, None]
    weight = tl.where(choice == unweighted, 0.0, tl.sum(tl.where(chosen, p, 0.0), axis=1))
    tl.store(weights + start + row, weight, mask=inside)
    tl.store(ids + start + row, choice.to(tl.int64), mask=inside)
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
    row, channel, lane, column = tl.arange(0, BLOCK), tl.arange(0, R), tl.arange(0, PART), tl.arange(0, COLUMNS)
    inside, known = row < rows - start, (column < CLASSES)[None, :]
    live, at, to = inside[:, None], row[:, None] * R + channel[None, :], row[:, None] * R + lane[None, :]
    scores = start * COLUMNS + row[:, None] * COLUMNS + column[None, :]
    state, d_projected, d_hidden1, d_hidden2 = (
        state + start * R, d_projected + start * R, d_hidden1 + start * R, d_hidden2 + start * R
    )
    total = sums + tl.program_id(0).to(tl.int64) * 3 * R + lane
    p = softmax(tl.load(logits + scores, mask=live, other=0.0), known)
    choice = tl.load(ids + start + row, mask=inside, other=0).to(tl.int32)
    chosen = column[None, :] == choice[:, None]
    upstream = tl.load(d_weights + start + row, mask=inside & (choice != unweighted), other=0.0).to(tl.float32)
    upstream *= tl.sum(tl.where(chosen, p, 0.0), axis=1)
    grad = (upstream[:, None] * (tl.where(chosen, 1.0, 0.0) - p)).to(state.dtype.element_ty)
    tl.store(d_logits + scores, grad, mask=live)
    back_through_gelu(grad, w_out, hidden2 + start * R, active2 + start * R, d_hidden2, to, live, CLASSES, R, PART)
    tl.debug_barrier()
    grad = tl.load(d_hidden2 + at, mask=live, other=0.0)
    back_through_gelu(grad, w2, hidden1 + start * R, active1 + start * R, d_hidden1, to, live, R, R, PART)
    tl.debug_barrier()
    grad = tl.load(d_hidden1 + at, mask=live, other=0.0)
    squares, products = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, R, PART):
        back = tl.dot(grad, tl.load(w1 + first + channel[:, None] * R + lane[None, :]), input_precision="ieee")
        tl.store(d_projected + first + to, back.to(grad.dtype), mask=live)  # loaded ahead for the loop below
        wide = tl.load(state + first + to, mask=live, other=0.0).to(tl.float32)
        squares += tl.sum(wide * wide, axis=1)
        scale = tl.load(w_norm + first + lane).to(tl.float32)[None, :]
        products += tl.sum(back.to(grad.dtype).to(tl.float32) * scale * wide, axis=1)
    inverse = tl.rsqrt(squares / R + eps)[:, None]
    common = products[:, None] * inverse / R
    tl.debug_barrier()
    for first in range(0, R, PART):
        direction = tl.load(state + first + to, mask=live, other=0.0).to(tl.float32) * inverse
        back = tl.load(d_projected + first + to, mask=live, other=0.0).to(tl.float32)
        scale = tl.load(w_norm + first + lane).to(tl.float32)[None, :]
        wide, before = inverse * (back * scale - direction * common), tl.zeros([BLOCK, PART], tl.float32)
        if HAS_D_STATE:
            wide += tl.load(d_state + start * R + first + to, mask=live, other=0.0).to(tl.float32)
        if HAS_PREVIOUS:
            before = tl.load(previous + start * R + first + to, mask=live, other=0.0).to(tl.float32)
            d_before = wide * tl.load(gamma + first + lane).to(tl.float32)[None, :]
            tl.store(d_previous + start * R + first + to, d_before.to(grad.dtype), mask=live)
        tl.debug_barrier()  # before d_projected is written
        tl.store(d_projected + first + to, wide.to(grad.dtype), mask=live)
        tl.store(normed + start * R + first + to, (direction * scale).to(grad.dtype), mask=live)
        d_b_down, d_gamma, d_norm = tl.reduce((wide, wide * before, back * direction), 0, add_three)
        tl.store(total + first, d_b_down)
        tl.store(total + R + first, d_gamma)
        tl.store(total + 2 * R + first, d_norm)


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
    out, into = tile // SIDE % SIDE * TILE + tl.arange(0, TILE), tile % SIDE * TILE + tl.arange(0, TILE)
    piece = (tile * SLICE + tl.arange(0, SLICE))[None, :]
    # 64 columns for the classes: fewer rows of a product are no wgmma, whose loop waits for no other instruction
    column, vector, one = tl.arange(0, 64), tl.arange(0, 4)[:, None], tl.arange(0, 16)[None, :]
    d_hidden, inputs = d_hidden + matrix.to(tl.int64) * rows * R, inputs + matrix.to(tl.int64) * rows * R
    product, d_bias, d_out, total = (
        tl.zeros([TILE, TILE], tl.float32), tl.zeros([TILE, 16], tl.float32), tl.zeros([64, SLICE], tl.float32),
        tl.zeros([4, SLICE], tl.float32),
    )
    for block in range(tl.program_id(0), tl.cdiv(rows, BLOCK), tl.num_programs(0)):
        row = (block * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[:, None]
        chain = tl.load(sums + (block * 3 + vector) * R + piece, mask=vector < 3, other=0.0)
        grad = tl.load(d_hidden + row * R + out[None, :], mask=row < rows, other=0.0)
        x = tl.load(inputs + row * R + into[None, :], mask=row < rows, other=0.0)
        product = tl.dot(grad.T, x, product, input_precision="ieee")
        d_bias = tl.dot(grad.T, tl.full([BLOCK, 16], 1.0, grad.dtype), d_bias, input_precision="ieee")
        known = (row < rows) & (column < COLUMNS)[None, :]
        scores = tl.load(d_logits + row * COLUMNS + column[None, :], mask=known, other=0.0)
        active = tl.load(active2 + row * R + piece, mask=row < rows, other=0.0)
        d_out = tl.dot(scores.T, active, d_out, input_precision="ieee")
        total += chain
    slabs += tl.program_id(0).to(tl.int64) * (2 * R + CLASSES + 5) * R
    tl.store(slabs + (matrix * R + out[:, None]) * R + into[None, :], product)
    others = slabs + 2 * R * R
    tl.store(others + column[:, None] * R + piece, d_out, mask=(column < CLASSES)[:, None])
    tl.store(others + (CLASSES + vector) * R + piece, total, mask=vector < 3)
    tl.store(others + (CLASSES + 3 + matrix) * R + out[:, None] + one, d_bias, mask=(one == 0) & (tile % SIDE == 0))
