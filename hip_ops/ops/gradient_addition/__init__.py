# SPDX-License-Identifier: Apache-2.0
"""Adds a gradient that was rounded to 16 bits to an fp32 main gradient, as a torch operator.

It runs where a device does not multiply 16-bit matrices into fp32 (runtime/main_grad.py, `way_of_adding`), as torch 2.9
on ROCm, and for grouped_mm. torch's own kernel for two dtypes moves one element at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.ops.gradient_addition import reference
from hip_ops.runtime.operator import Operator


def _example(device: torch.device, rows: int = 96, columns: int = 2048) -> tuple:
    """Make several blocks of elements and one that is not full; in the second example the arrays do not end at
    multiples of 16 bytes.
    """
    return torch.randn(rows, columns, device=device), torch.randn(rows, columns, device=device).bfloat16()


def _example_of_single_elements(device: torch.device) -> tuple:
    return _example(device, 3, 1101)


_add_gradient = Operator(
    reference.add_gradient_,
    takes="""
        total  [...]  fp32
        part   [...]  bf16|fp16|fp32
    """,
    mutates=("total",),
    example=(_example, _example_of_single_elements),
    tolerance=1e-6,
    fits={"hip": lambda total, part: total.is_contiguous() and part.is_contiguous() and part.dtype == torch.bfloat16},
)


def add_gradient_(total: Tensor, part: Tensor) -> None:
    """Compute total += part in place, each sum in fp32.

    Args: total [...], fp32. part [...], bf16, fp16 or fp32. All-fp64 tensors are computed by the torch reference.
    Raises ValueError on wrong shapes, dtypes or devices.
    """
    _add_gradient(total, part)
