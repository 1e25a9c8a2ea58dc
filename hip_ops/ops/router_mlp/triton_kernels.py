# SPDX-License-Identifier: Apache-2.0
"""ZAYA1's router behind its down projection in Triton: one kernel forward, one backward, no atomics.

Same formulas and conventions as reference.py. A program computes a tile of rows from the state to the
choice, or back; sums over rows are first taken in each program, then over the programs. Each product keeps its rows in
shared memory and reads the matrix from the cache, a part of its columns at a time, while the next part is loaded. A
part's results go to the result tensors; the next product reads its rows there after a barrier, because no other program
writes them. So registers hold one part, and two programs share a multiprocessor of Hopper.
"""

import triton
import triton.language as tl

INVERSE_SQRT_2 = tl.constexpr(0.7071067811865476)
INVERSE_SQRT_2_PI = tl.constexpr(0.3989422804014327)


@triton.jit
def gelu(x):
    wide = x.to(tl.float32)
    return (0.5 * wide * (1.0 + tl.erf(wide * INVERSE_SQRT_2))).to(x.dtype)


@triton.jit
def gelu_backward(grad, x):
    """Return grad * gelu'(x) in x's dtype, which is grad's too."""
    wide = x.to(tl.float32)
    slope = 0.5 * (1.0 + tl.erf(wide * INVERSE_SQRT_2)) + wide * INVERSE_SQRT_2_PI * tl.exp(-0.5 * wide * wide)
    return (grad.to(tl.float32) * slope).to(x.dtype)


@triton.jit
def back_through_gelu(grad, hidden, active, d_hidden, total, at, live):
    """Write, for the columns `at`, the gradient of hidden to d_hidden, gelu(hidden) to active and the sum over rows to
    total. grad: of gelu(hidden).
    """
    x = tl.load(hidden + at, mask=live, other=0.0)
    tl.store(active + at, gelu(x), mask=live)
    grad = gelu_backward(grad, x)
    tl.store(d_hidden + at, grad, mask=live)
    tl.store(total, tl.sum(grad.to(tl.float32), axis=0))


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
    return part, row.to(tl.int64)[:, None] * R + part[None, :]


@triton.jit
def router_mlp_forward_kernel(
    projected, previous, gamma, b_down, w_norm, w1, b1, w2, b2, w_out, biases, forced, state, weights, ids, hidden1,
    hidden2, logits, statistics, rows, eps, unweighted,
    HAS_PREVIOUS: tl.constexpr, HAS_FORCED: tl.constexpr, R: tl.constexpr, CLASSES: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr, PART: tl.constexpr,
):
    """Compute BLOCK tokens. statistics: of this program's tokens. COLUMNS: CLASSES and the padding columns after them.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    channel = tl.arange(0, R)
    at = row.to(tl.int64)[:, None] * R + channel[None, :]
    live = inside[:, None]
    squares = tl.zeros([BLOCK], tl.float32)
    for first in range(0, R, PART):
        part, to = part_of_rows(row, first, R, PART)
        wide = (
            tl.load(projected + to, mask=live, other=0.0).to(tl.float32)
            + tl.load(b_down + part).to(tl.float32)[None, :]
        )
        if HAS_PREVIOUS:
            wide += (
                tl.load(previous + to, mask=live, other=0.0).to(tl.float32)
                * tl.load(gamma + part).to(tl.float32)[None, :]
            )
        y = wide.to(state.dtype.element_ty)
        tl.store(state + to, y, mask=live)
        squares += tl.sum(y.to(tl.float32) * y.to(tl.float32), axis=1)
    inverse = tl.rsqrt(squares / R + eps)[:, None]
    tl.debug_barrier()
    for first in range(0, R, PART):
        part, to = part_of_rows(row, first, R, PART)
        direction = tl.load(state + to, mask=live, other=0.0).to(tl.float32) * inverse
        tl.store(
            hidden2 + to,
            (direction * tl.load(w_norm + part).to(tl.float32)[None, :]).to(hidden2.dtype.element_ty),
            mask=live,
        )
    tl.debug_barrier()
    x = tl.load(hidden2 + at, mask=live, other=0.0)
    tl.debug_barrier()
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
    tl.store(logits + row.to(tl.int64)[:, None] * COLUMNS + column[None, :], scores, mask=live)
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
    """Compute BLOCK tokens; sums: the five of this program. Rows beyond the last one are zeros."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < rows
    live = inside[:, None]
    channel, column = tl.arange(0, R), tl.arange(0, COLUMNS)
    at = row.to(tl.int64)[:, None] * R + channel[None, :]
    total = sums + tl.program_id(0).to(tl.int64) * 5 * R
    known = (column < CLASSES)[None, :]
    p = softmax(tl.load(logits + row.to(tl.int64)[:, None] * COLUMNS + column[None, :], mask=live, other=0.0), known)
    choice = tl.load(ids + row, mask=inside, other=0).to(tl.int32)
    chosen = column[None, :] == choice[:, None]
    upstream = tl.load(d_weights + row, mask=inside & (choice != unweighted), other=0.0).to(tl.float32)
    upstream *= tl.sum(tl.where(chosen, p, 0.0), axis=1)
    grad = (upstream[:, None] * (tl.where(chosen, 1.0, 0.0) - p)).to(state.dtype.element_ty)
    tl.store(d_logits + row.to(tl.int64)[:, None] * COLUMNS + column[None, :], grad, mask=live)
    for first in range(0, R, PART):
        part, to = part_of_rows(row, first, R, PART)
        matrix = tl.load(w_out + column[:, None] * R + part[None, :], mask=(column < CLASSES)[:, None], other=0.0)
        back = tl.dot(grad, matrix, input_precision="ieee").to(grad.dtype)
        back_through_gelu(back, hidden2, active2, d_hidden2, total + 4 * R + part, to, live)
    tl.debug_barrier()
    grad = tl.load(d_hidden2 + at, mask=live, other=0.0)
    for first in range(0, R, PART):
        part, to = part_of_rows(row, first, R, PART)
        back = tl.dot(grad, tl.load(w2 + channel[:, None] * R + part[None, :]), input_precision="ieee").to(grad.dtype)
        back_through_gelu(back, hidden1, active1, d_hidden1, total + 3 * R + part, to, live)
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
        scale = tl.load(w_norm + part).to(tl.float32)[None, :]
        tl.store(normed + to, (direction * scale).to(grad.dtype), mask=live)
        wide = tl.load(d_projected + to, mask=live, other=0.0).to(tl.float32)
        tl.debug_barrier()  # before they are written
        tl.store(total + 2 * R + part, tl.sum(wide * direction, axis=0))
        wide = inverse * (wide * scale - direction * common)
        if HAS_D_STATE:
            wide += tl.load(d_state + to, mask=live, other=0.0).to(tl.float32)
        tl.store(d_projected + to, wide.to(grad.dtype), mask=live)
        tl.store(total + part, tl.sum(wide, axis=0))
        if HAS_PREVIOUS:
            tl.store(d_previous + to, (wide * tl.load(gamma + part).to(tl.float32)[None, :]).to(grad.dtype), mask=live)
            before = tl.load(previous + to, mask=live, other=0.0).to(tl.float32)
            tl.store(total + R + part, tl.sum(wide * before, axis=0))
        else:
            tl.store(total + R + part, tl.zeros([PART], tl.float32))
