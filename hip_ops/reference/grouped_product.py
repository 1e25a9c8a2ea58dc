# SPDX-License-Identifier: Apache-2.0
"""Matrix products over rows sorted by expert in plain torch: a loop over the experts, which reads their borders on the host.

offsets int32 [E], the ends of the experts' rows, ascending, offsets[-1] <= T. Rows at and beyond offsets[-1] belong to no expert.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def _ranges(offsets: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        yield expert, slice(start, end)
        start = end


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In fp32, or fp64 for fp64 tensors: sums are rounded once, as a kernel's are."""
    return tuple(t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors)


def grouped_rows(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """out[i] = x[i] @ matrices[expert of i]; x [T, k], matrices [E, k, n] -> [T, n], zeros in rows of no expert."""
    out = x.new_zeros(x.shape[0], matrices.shape[2])
    for expert, rows in _ranges(offsets):
        left, right = _wide(x[rows], matrices[expert])
        out[rows] = (left @ right).to(out.dtype)
    return out


def grouped_outer_(out: Tensor, a: Tensor, b: Tensor, offsets: Tensor, accumulate: bool) -> None:
    """out[e] (+)= a[rows of e]^T b[rows of e]; a [T, m], b [T, n], out [E, m, n]. Without accumulate zeros where an expert has no rows."""
    for expert, rows in _ranges(offsets):
        left, right = _wide(a[rows], b[rows])
        product = left.t() @ right
        out[expert] = (out[expert] + product if accumulate else product).to(out.dtype)
