# SPDX-License-Identifier: Apache-2.0
"""Matrix products over rows that are sorted by expert, each expert with its own matrix.

Backed by torch's grouped_mm, which reads the group borders on the device, so nothing waits for the host. Where it does
not exist for the device and dtype (fp32 and fp16 on GPUs, fp64) or rows are not multiples of 16 bytes, a loop over
experts does the same and needs the borders on the host. The rows of a CPU always go through the loop: its matrix product
takes another path for up to three rows a thread, so that a token's bits would depend on how many others chose its expert.
"""

from __future__ import annotations

import functools
import logging

import torch
import torch.nn.functional as F
from torch import Tensor

logger = logging.getLogger(__name__)

_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_GROUPED_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}


def has_grouped_mm(*tensors: Tensor) -> bool:
    """Whether torch's grouped_mm takes these tensors: device, dtype, and strides and addresses in steps of 16 bytes."""
    x = tensors[0]
    return _grouped_mm is not None and x.dtype in _GROUPED_DTYPES.get(x.device.type, ()) and all(
        t.data_ptr() % 16 == 0 and all(stride == 1 or stride * t.itemsize % 16 == 0 for stride in t.stride())
        for t in tensors
    )


def _least_rows() -> int:
    """Groups of fewer rows are filled up with zeros: from here on a row's product did not depend on the number of rows
    (fp32 on an AMD EPYC, 1 to 16 threads, up to 600 rows; bf16 never did)."""
    return max(16, 4 * torch.get_num_threads())


@functools.cache
def _announce_loop(device_type: str, dtype: torch.dtype) -> None:
    logger.warning("no grouped GEMM for %s of these sizes on %s: looping over experts, with a host synchronisation per "
                   "call", dtype, device_type)


def _borders(offsets: Tensor) -> list[tuple[int, int]]:
    ends = offsets.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _use_loop(*tensors: Tensor) -> bool:
    if has_grouped_mm(*tensors):
        return False
    if tensors[0].device.type != "cpu":
        _announce_loop(tensors[0].device.type, tensors[0].dtype)
    return True


def grouped_rows(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """out[i] = x[i] @ matrices[e(i)]; x [T, k], matrices [E, k, n], offsets int32 [E] ends of the experts' rows.

    Returns [T, n]. Rows at and beyond offsets[-1] hold anything, NaN included.
    """
    if not (x.is_cpu or _use_loop(x, matrices)):
        return _grouped_mm(x, matrices, offs=offsets)
    out = x.new_zeros(x.shape[0], matrices.shape[-1])
    least = _least_rows()
    for expert, (start, end) in enumerate(_borders(offsets)):
        missing = least - (end - start)
        if missing <= 0:
            torch.mm(x[start:end], matrices[expert], out=out[start:end])
        elif start < end:
            out[start:end] = torch.mm(F.pad(x[start:end], (0, 0, 0, missing)), matrices[expert])[:-missing]
    return out


def grouped_outer(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """out[e] = a[rows of e].T @ b[rows of e]; a [T, m], b [T, n]. Returns [E, m, n], zeros for an expert without rows.

    Rows at and beyond offsets[-1] are not read.
    """
    if not _use_loop(a, b):
        return _grouped_mm(a.t(), b, offs=offsets)
    out = a.new_zeros(offsets.numel(), a.shape[1], b.shape[1])
    for expert, (start, end) in enumerate(_borders(offsets)):
        torch.mm(a[start:end].t(), b[start:end], out=out[expert])
    return out
