# SPDX-License-Identifier: Apache-2.0
"""Numbers the rows of the CCA prologue as in memory, [s, b], so that a tile may hold many short sequences.

Row f is micro-batch entry f % batch at row f // batch of the sequence, which is row t of chunk (f // batch) // rows. In
`projected` it is at (f // batch) * row_stride + entry * batch_stride; before a chunk there may be the two rows of halo.

Both divisors are constant in a call, and a kernel divides for every row in each of its layouts. So it multiplies by a
number that the host derives from the divisor (`divisor`). Importing this module imports triton.
"""

from functools import lru_cache

import triton
import triton.language as tl

# For do_not_specialize: Triton would compile again where one of them is 1 or divisible by 16, without better code.
SIZES = ("total", "early_total", "rows", "batch", "by_batch", "by_rows", "by_early", "tiles", "runs", "bias_runs")


@lru_cache
def divisor(by: int) -> int:
    """Return the argument of `divide` for a division by 1 <= by < 2^31: bits 6 and up m = ceil(2^(31 + l) / by) <
    2^32, below them l = ceil(log2 by).

    n m / 2^(31 + l) lies above n / by by less than 1 / by for all 0 <= n < 2^31 (Granlund and Montgomery, PLDI 1994).
    """
    bits = (by - 1).bit_length()
    return -(-(1 << (31 + bits)) // by) << 6 | bits


@triton.jit
def divide(n, by):
    """Return n // by for int32 n >= 0."""
    doubled = n.to(tl.uint32) << 1
    return (tl.umulhi(doubled, (by >> 6).to(tl.uint32)) >> (by & 63).to(tl.uint32)).to(tl.int32)


@triton.jit
def place(f, rows, batch, by_rows, by_batch):
    """Return row t of the chunk, micro-batch entry, row of the sequence, and chunk, of flat rows f; int32."""
    row = divide(f, by_batch)
    chunk = divide(row, by_rows)
    return row - chunk * rows, f - row * batch, row, chunk


@triton.jit
def at_row(row, entry, row_stride, batch_stride):
    """Return the offsets of rows, int64; every factor has 32 bits, which multiply in one instruction."""
    return row.to(tl.int64) * row_stride + entry.to(tl.int64) * batch_stride


@triton.jit
def reach(starts, t, entry, chunk, live, rows, batch, HAS_STARTS: tl.constexpr):
    """Return whether rows see the previous row, and the two previous rows, that is, no document starts in between.
    `starts` is [k, rows + 1, b].
    """
    near = live
    far = live
    if HAS_STARTS:
        at = starts + ((chunk * (rows + 1) + t).to(tl.int64) * batch + entry)
        near = live & (tl.load(at + batch, mask=live, other=1) == 0)
        far = near & (tl.load(at, mask=live, other=1) == 0)
    return near, far


@triton.jit
def row_before(
    halo, base, t, entry, chunk, batch, row_stride, channels, BACK: tl.constexpr, HAS_HALO: tl.constexpr
):
    """Return the addresses of the rows BACK before those at `base`, in projected or in halo [k, 2, b, channels], and
    whether they exist.
    """
    at = base - BACK * row_stride
    exists = t >= BACK
    if HAS_HALO:
        slot = (chunk * 2 + t + 2 - BACK).to(tl.int64) * batch + entry
        at = tl.where(exists, at, halo + slot * channels)
        exists = t >= 0
    return at, exists


@triton.jit
def rotation(rope, row, entry, live, rope_row_stride, rope_batch_stride, p, ROTARY: tl.constexpr):
    """Return cos and sin of pairs p; 1 and 0 where a pair does not rotate. Rows lie along one dimension of a tile, p
    along the other.
    """
    at = rope + at_row(row, entry, rope_row_stride, rope_batch_stride) + p
    turns = live & (p < ROTARY // 2)
    return tl.load(at, mask=turns, other=1.0), tl.load(at + ROTARY // 2, mask=turns, other=0.0)
