# SPDX-License-Identifier: Apache-2.0
"""Grouped products on the Triton kernels of AITER. Not run on any device by this project.

AITER names ptgmm's results as fp16 or bf16, but its kernel adds to and stores the dtype of the output; the
self-check compares sums in fp32. `nptgmm` is not used: it leaves the block of an expert without rows unwritten.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.runtime.aiter import Function
from hip_ops.runtime.launch import on

FIRST_RELEASE = "0.1.16"  # before, each call reads the groups' sizes on the host, and fails where no expert has rows
_MODULE = "aiter.ops.triton.gmm"
GMM = Function(_MODULE, "gmm", ("lhs", "rhs", "group_sizes", "preferred_element_type"))
PTGMM = Function(
    _MODULE, "ptgmm", ("lhs", "rhs", "group_sizes", "preferred_element_type", "existing_out", "accumulate")
)
DTYPES = (torch.bfloat16, torch.float16)


def fits_rows(x: Tensor, matrices: Tensor, offsets: Tensor) -> bool:
    """Return whether gmm takes these operands: contiguous rows, and matrices stored whole, by rows or by columns.

    It refuses square matrices that are stored by rows: it cannot tell them from transposed ones.
    """
    k, n = matrices.shape[1:]
    by_rows, by_columns = (k * n, n, 1), (k * n, 1, k)
    stored = matrices.stride() == by_columns or matrices.stride() == by_rows and k != n
    return x.dtype in DTYPES and _rows(x) and min(k, n) > 1 and stored


def fits_outer(out: Tensor, a: Tensor, b: Tensor, offsets: Tensor, accumulate: bool) -> bool:
    """Return whether ptgmm takes these operands. A sum in 16 bits would be rounded before it is added."""
    m, n = out.shape[1:]
    exact = out.dtype == torch.float32 or not accumulate
    return a.dtype in DTYPES and _rows(a) and _rows(b) and min(m, n) > 1 and out.stride() == (m * n, n, 1) and exact


def _rows(x: Tensor) -> bool:
    return len(x) > 0 and x.stride() == (x.shape[1], 1)


def _sizes(offsets: Tensor) -> Tensor:
    return torch.diff(offsets, prepend=offsets.new_zeros(1))


def grouped_rows(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """As reference.grouped_rows, but padding rows are not written."""
    with on(x.device):
        return GMM(lhs=x, rhs=matrices, group_sizes=_sizes(offsets), preferred_element_type=x.dtype)


def grouped_outer_(out: Tensor, a: Tensor, b: Tensor, offsets: Tensor, accumulate: bool) -> None:
    """As reference.grouped_outer_."""
    with on(a.device):
        PTGMM(
            lhs=a.t(),
            rhs=b,
            group_sizes=_sizes(offsets),
            preferred_element_type=out.dtype,
            existing_out=out,
            accumulate=accumulate,
        )
