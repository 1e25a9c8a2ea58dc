# SPDX-License-Identifier: Apache-2.0
"""Products of the head by quack's GEMM on Hopper (package quack-kernels 0.6.5)."""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.runtime.quack_tiles import Tile, aligned, gemm

MULTIPLE = 8  # of all sizes; tails of single numbers were not run
# The fastest of nine on an H200 for a chunk of 2,048 tokens: of logits, of the gradient of hidden and of the weight's.
# Chunks of 4,096 and 8,192 tokens are slower than with the library (docs/log.md).
LOGITS, HIDDEN, WEIGHT = Tile(256, 192, False, 2, 1), Tile(256, 128, False, 1, 2), Tile(192, 128, True, 1, 2)
MAX_TOKENS = 2048


def fits(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> bool:
    """Return whether quack takes the operands: bf16, added only to fp32, and aligned, a and b by rows or by columns."""
    if a.dtype != torch.bfloat16 or (accumulate and out.dtype != torch.float32):
        return False
    if any(size % MULTIPLE or not size for size in (*a.shape, b.shape[1])):
        return False
    return aligned(out) and all(aligned(matrix) or aligned(matrix.t()) for matrix in (a, b))


def faster(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> bool:
    """Return whether quack is also faster than the library."""
    return a.shape[1 if accumulate else 0] <= MAX_TOKENS and fits(out, a, b, accumulate)


def tile(b: Tensor, accumulate: bool) -> Tile:
    """Return the tile: of logits where b lies by columns, the transposed vocabulary."""
    if accumulate:
        return WEIGHT
    return LOGITS if b.stride(0) == 1 else HIDDEN


def dense_product_(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """As reference.dense_product_."""
    gemm()(a, b.mT, out, None, None, add_to_output=accumulate, **tile(b, accumulate).words())
