# SPDX-License-Identifier: Apache-2.0
"""Where the rows of the CCA prologue lie: numbered as in memory, [s, b], so that a tile may hold many short sequences.

Row f is micro-batch entry f % batch at row f // batch of the sequence, which is row t of chunk (f // batch) // rows. In `projected` it
is at (f // batch) * row_stride + entry * batch_stride; before a chunk there may be the two rows of halo.
Importing this module imports triton.
"""

import triton
import triton.language as tl


@triton.jit
def place(f, rows, batch):
    """Row t of the chunk, micro-batch entry, row of the sequence, and chunk, of flat rows f; int64 where it makes an address."""
    row = f // batch
    chunk = row // rows
    return row - chunk * rows, (f - row * batch).to(tl.int64), row.to(tl.int64), chunk.to(tl.int64)


@triton.jit
def reach(starts, t, entry, chunk, live, rows, batch, HAS_STARTS: tl.constexpr):
    """Whether rows may see the one before them, and the two before them: no document starts in between. `starts` is [k, rows + 1, b]."""
    near = live
    far = live
    if HAS_STARTS:
        at = starts + (chunk * (rows + 1) + t) * batch + entry
        near = live & (tl.load(at + batch, mask=live, other=1) == 0)
        far = near & (tl.load(at, mask=live, other=1) == 0)
    return near, far


@triton.jit
def row_before(
    projected, halo, base, t, entry, chunk, batch, row_stride, channels, BACK: tl.constexpr, HAS_HALO: tl.constexpr
):  # fmt: skip
    """Addresses of the rows BACK before those at `base`, in projected or in halo [k, 2, b, channels], and whether they exist."""
    at = base - BACK * row_stride
    exists = t >= BACK
    if HAS_HALO:
        slot = (chunk * 2 + t + 2 - BACK) * batch + entry
        at = tl.where(exists, at, halo + slot * channels)
        exists = t >= 0
    return at, exists


@triton.jit
def pair_columns(HALF: tl.constexpr, ROTARY: tl.constexpr):
    """Channels of a head in two halves of HALF that rotate into each other: i with i + ROTARY / 2 below ROTARY, the rest alike."""
    p = tl.arange(0, HALF)
    beyond = (p >= ROTARY // 2).to(tl.int32)
    return p + beyond * (ROTARY // 2), p + ROTARY // 2 + beyond * (HALF - ROTARY // 2)


@triton.jit
def rotation(rope, row, entry, live, rope_row_stride, rope_batch_stride, p, ROTARY: tl.constexpr):
    """cos and sin of pairs p; 1 and 0 where a pair does not rotate. Rows lie along one dimension of a tile, p along the other."""
    at = rope + row * rope_row_stride + entry * rope_batch_stride + p
    turns = live & (p < ROTARY // 2)
    return tl.load(at, mask=turns, other=1.0), tl.load(at + ROTARY // 2, mask=turns, other=0.0)
