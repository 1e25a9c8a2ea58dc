# SPDX-License-Identifier: Apache-2.0
"""Matrix products over rows sorted by expert in plain torch: a loop over the experts, for whose borders the host waits.

offsets int32 [E], the ends of the experts' rows, ascending, offsets[-1] <= T. Rows at and beyond offsets[-1] are
padding rows, which belong to no expert (hip_ops/ops/expert_permutation/reference.py).
Sums are fp32, or fp64 for fp64 tensors, and each result is rounded once.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hip_ops.errors import warn_once
from hip_ops.runtime import self_check
from hip_ops.runtime.launch import wide


def _least_rows() -> int:
    """Return the number of rows from which a row's product does not depend on the number of rows.

    Measured in fp32 on an AMD EPYC, 1 to 16 threads, up to 600 rows: up to three rows per thread take another path.
    """
    return max(16, 4 * torch.get_num_threads())


def _counts(offsets: Tensor, rows: int, dtype: torch.dtype) -> list[int]:
    """Return the rows of each expert, and the number of padding rows."""
    if offsets.device.type not in ("cpu", "meta") and not self_check.comparing:
        text = "hip_ops: grouped products of %s on %s loop over the experts and synchronise the host in each call"
        warn_once(("loop over experts", offsets.device, dtype), text, dtype, offsets.device)
    ends = [0] * len(offsets) if offsets.device.type == "meta" else offsets.tolist()
    return [end - start for start, end in zip([0, *ends], [*ends, rows], strict=True)]


def grouped_rows(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Return out[i] = x[i] @ matrices[expert of i]; x [T, k], matrices [E, k, n] -> [T, n], zeros in padding rows.

    Rows of zeros are added to a small group, because otherwise a token's bits would depend on how many tokens its
    expert has.
    """
    out, least = x.new_zeros(x.shape[0], matrices.shape[2]), _least_rows()
    counts, compute = _counts(offsets, len(x), x.dtype), wide(x.dtype)
    parts = zip(
        counts, matrices.unbind(), x.to(compute).split_with_sizes(counts), out.split_with_sizes(counts), strict=False
    )
    for count, matrix, rows, result in parts:
        if count >= least and compute == x.dtype:
            torch.mm(rows, matrix, out=result)
        elif count:
            result.copy_((F.pad(rows, (0, 0, 0, max(least - count, 0))) @ matrix.to(compute))[:count])
    return out


def grouped_outer_(out: Tensor, a: Tensor, b: Tensor, offsets: Tensor, accumulate: bool) -> None:
    """Compute out[e] (+)= a[rows of e]^T b[rows of e]; a [T, m], b [T, n], out [E, m, n]. Without accumulate, an expert
    without rows gets zeros.
    """
    counts, compute = _counts(offsets, len(a), a.dtype), wide(a.dtype)
    parts = zip(
        out.unbind(),
        a.to(compute).t().split_with_sizes(counts, dim=1),
        b.to(compute).split_with_sizes(counts),
        strict=False,
    )
    in_place = out.dtype == compute
    for total, left, right in parts:
        sums = total if in_place else total.to(compute)
        sums.addmm_(left, right, beta=int(accumulate))
        if not in_place:
            total.copy_(sums)
