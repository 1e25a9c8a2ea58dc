# SPDX-License-Identifier: Apache-2.0
"""Grouped products by torch's grouped_mm: CUTLASS on NVIDIA; Composable Kernel or a loop on ROCm, depending on torch's
build.

Products are rounded to the operands' dtype, even those that are added to fp32 blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.runtime.main_grad import add_in_place

_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}


def available(device: torch.device) -> str | None:
    """Return why grouped_mm is not available, or None."""
    if _grouped_mm is None:
        return f"torch {torch.__version__} has no grouped_mm"
    return None if device.type in DTYPES else f"torch's grouped_mm does not run on {device.type}"


def grouped_rows(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """As reference.grouped_rows, but padding rows are not written."""
    return _grouped_mm(x, matrices, offs=offsets)


def grouped_outer_(out: Tensor, a: Tensor, b: Tensor, offsets: Tensor, accumulate: bool) -> None:
    """As reference.grouped_outer_, but each product is rounded before it is added."""
    products = _grouped_mm(a.t(), b, offs=offsets)
    if accumulate:
        add_in_place(out, products)
    else:
        out.copy_(products)
