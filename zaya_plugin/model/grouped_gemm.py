# SPDX-License-Identifier: Apache-2.0
"""Matrix products over rows that are sorted by expert, each expert with its own matrix, by whichever implementation suits the device.

`grouped_gemm_rule` says which one that is. Each reads the group borders on the device, so nothing waits for the host. Where none takes
the device and dtype (fp32 and fp16 on GPUs, fp64), a loop over experts does the same and needs the borders on the host. The rows of a CPU
always go through the loop: its matrix product takes another path for up to three rows a thread, so that a token's bits would depend on how
many others chose its expert.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor

from zaya_plugin.model.grouped_gemm_implementations import OUTER, ROWS, ROWS_T
from zaya_plugin.model.grouped_gemm_rule import choices
from zaya_plugin.model.main_grad import add_or_write

logger = logging.getLogger(__name__)


def _least_rows() -> int:
    """Groups of fewer rows are filled up with zeros: from here on a row's product did not depend on the number of rows
    (fp32 on an AMD EPYC, 1 to 16 threads, up to 600 rows; bf16 never did)."""
    return max(16, 4 * torch.get_num_threads())


@functools.cache
def _announce_loop(device_type: str, dtype: torch.dtype) -> None:
    logger.warning(
        "no grouped GEMM for %s of these sizes on %s: looping over experts, with a host synchronisation per call",
        dtype,
        device_type,
    )


def _borders(offsets: Tensor) -> list[tuple[int, int]]:
    ends = offsets.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _implementation(asked: str, form: str, *tensors: Tensor):
    """What computes `form` of these tensors, or None for the loop."""
    device, dtype = tensors[0].device, tensors[0].dtype
    for each in choices(asked, form, device, dtype):
        if each.takes(*tensors):
            return each
    if device.type != "cpu":
        _announce_loop(device.type, dtype)
    return None


def grouped_rows(x: Tensor, matrices: Tensor, offsets: Tensor, asked: str = "auto") -> Tensor:
    """out[i] = x[i] @ matrices[e(i)]; x [T, k], matrices [E, k, n], offsets int32 [E] ends of the experts' rows.

    Returns [T, n]. Rows at and beyond offsets[-1] hold anything, NaN included. asked: as `grouped_gemm_rule.choose`.
    """
    chosen = _implementation(asked, ROWS if matrices.stride(-1) == 1 else ROWS_T, x, matrices)
    if chosen is not None:
        return chosen.rows(x, matrices, offsets)
    out = x.new_zeros(x.shape[0], matrices.shape[-1])
    least = _least_rows()
    for expert, (start, end) in enumerate(_borders(offsets)):
        missing = least - (end - start)
        if missing <= 0:
            torch.mm(x[start:end], matrices[expert], out=out[start:end])
        elif start < end:
            out[start:end] = torch.mm(F.pad(x[start:end], (0, 0, 0, missing)), matrices[expert])[:-missing]
    return out


def grouped_outer(a: Tensor, b: Tensor, offsets: Tensor, asked: str = "auto") -> Tensor:
    """out[e] = a[rows of e].T @ b[rows of e]; a [T, m], b [T, n]. Returns [E, m, n], zeros for an expert without rows.

    Rows at and beyond offsets[-1] are not read.
    """
    chosen = _implementation(asked, OUTER, a, b)
    if chosen is not None:
        return chosen.outer(a, b, offsets)
    out = a.new_zeros(offsets.numel(), a.shape[1], b.shape[1])
    for expert, (start, end) in enumerate(_borders(offsets)):
        torch.mm(a[start:end].t(), b[start:end], out=out[expert])
    return out


def add_grouped_outer(
    total: Tensor, a: Tensor, b: Tensor, offsets: Tensor, asked: str = "auto", accumulate: bool = True
) -> None:
    """total[e] += a[rows of e].T @ b[rows of e] in place; total [E, m, n], fp32 or a's dtype. Without `accumulate` written there, whatever was.

    In fp32 without an intermediate result where the implementation can; else a's dtype rounds the product first, as autograd would.
    """
    chosen = _implementation(asked, OUTER, a, b)
    if chosen is not None:
        chosen.add_outer(total, a, b, offsets, accumulate)
    else:
        add_or_write(total, grouped_outer(a, b, offsets, asked), accumulate)
