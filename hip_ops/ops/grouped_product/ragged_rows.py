# SPDX-License-Identifier: Apache-2.0
"""Tensor descriptors whose loads and stores end at the end of an expert's rows, a border known only on the device.

The hardware masks accesses beyond a descriptor's shape. Here the last rows of a range lie at the end of a dimension of
BORDER rows, and two more dimensions correct the address: with coordinates (BORDER, end, BORDER - size + row) and
strides (2^34 - stride, stride, stride) the offset is BORDER * 2^34 + (end - size + row) * stride elements, and
BORDER * 2^34 = 2^64 is 0 in 64-bit arithmetic. This is the method of triton.tools.ragged_tma, whose device functions
Triton's interpreter does not support.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hip_ops.runtime.descriptors import descriptor

BORDER = tl.constexpr(2**30)
MAX_EXTENT = 0x7FFF0000


def ragged_rows(x: Tensor, block: Sequence[int]) -> TensorDescriptor:
    """Return the descriptor of x [rows, columns] with contiguous rows; block: rows and columns of one load or
    store.
    """
    (rows, columns), (stride, one) = x.shape, x.stride()
    assert one == 1 and rows <= BORDER.value
    return descriptor(
        x, (MAX_EXTENT, MAX_EXTENT, BORDER.value, columns), (2**34 - stride, stride, stride, 1), (1, 1, *block)
    )


@triton.jit
def load_rows(desc, start, end, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Load x[start + row :, column :], with zeros from x[end] on."""
    return desc.load([BORDER, end, BORDER - (end - start) + row, column]).reshape(ROWS, COLUMNS)


@triton.jit
def store_rows(desc, start, end, row, column, block, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Store block to x[start + row :, column :], except rows from x[end] on."""
    desc.store([BORDER, end, BORDER - (end - start) + row, column], block.reshape(1, 1, ROWS, COLUMNS))
