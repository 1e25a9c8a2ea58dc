# SPDX-License-Identifier: Apache-2.0
"""Products of the head by quack's GEMM on Hopper (package quack-kernels 0.6.5)."""

from __future__ import annotations

import importlib

import torch
from torch import Tensor

from hip_ops.runtime.quack_tiles import Tile

ALIGNMENT = 16  # bytes; of addresses and strides, which TMA requires
# The fastest of nine on an H200 for chunks of 2,048 tokens (docs/log.md): of logits, of sums in fp32, and of results
# that have too few tiles of the first kind for all multiprocessors.
STORED, ADDED, FEW = Tile(256, 192, False, 2, 1), Tile(192, 128, True, 1, 2), Tile(256, 128, False, 1, 2)
PROCESSORS = 132  # multiprocessors of an H100 or H200


def fits(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> bool:
    """Return whether quack takes the operands: bf16, added only to fp32, and aligned."""
    if a.dtype != torch.bfloat16 or (accumulate and out.dtype != torch.float32):
        return False
    return all(map(_aligned, (out, a, b)))


def _aligned(matrix: Tensor) -> bool:
    """Return whether the matrix is contiguous in rows or columns, with addresses that are multiples of ALIGNMENT."""
    along, across = sorted(matrix.stride())
    sizes = (across, *matrix.shape)
    return (
        along == 1
        and not any(extent * matrix.itemsize % ALIGNMENT or not extent for extent in sizes)
        and (matrix.data_ptr() % ALIGNMENT == 0)
    )


def tile(rows: int, columns: int, accumulate: bool) -> Tile:
    """Return the tile of a result [rows, columns]."""
    if accumulate:
        return ADDED
    return STORED if -(-rows // STORED.m) * -(-columns // STORED.n) >= PROCESSORS else FEW


def dense_product_(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """As reference.dense_product_."""
    gemm = importlib.import_module("quack.gemm").gemm
    gemm(a, b.mT, out, None, None, add_to_output=accumulate, **tile(*out.shape, accumulate).words())
