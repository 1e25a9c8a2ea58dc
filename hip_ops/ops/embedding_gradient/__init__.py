# SPDX-License-Identifier: Apache-2.0
"""Adds an embedding's gradient to a main gradient row by row, as a torch operator."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hip_ops.ops.embedding_gradient import reference
from hip_ops.runtime.model_sizes import model_sizes
from hip_ops.runtime.operator import Operator


def _example(device: torch.device, width: int | None = 1100) -> tuple:
    """Make ids in random order that occur once, several times, and more often than the rows of one program; 512 as in
    training a multiple of 16, for which Triton compiles another kernel.

    width: of the rows; 1100 numbers of bf16 do not end at multiples of 16 bytes; None: the
    model's hidden size, whose rows do.
    """
    width = width or model_sizes().hidden_size
    ids = torch.cat((torch.randint(50, (310,)), torch.full((200,), 7), torch.tensor([0, 49]))).to(device)
    return (
        torch.randn(50, width, device=device),
        ids[torch.randperm(len(ids)).to(device)],
        torch.randn(len(ids), width, device=device).bfloat16(),
    )


_add_rows = Operator(
    reference.add_rows_,
    takes="""
        total  [v, h]  bf16|fp32
        ids    [n]     int64
        rows   [n, h]  bf16|fp32
    """,
    mutates=("total",),
    example=(_example, functools.partial(_example, width=None)),
    tolerance=1e-5,
    fits={
        "hip": lambda total, *_: total.dtype == torch.float32 and total.stride(1) == 1,
        "triton": lambda total, *_: total.stride(1) == 1,
    },
)


def add_rows_(total: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Compute total[ids] += rows in place, the same bits every time: rows of one id are summed in fp32 in their order
    before they are added.

    Args: total [v, h], fp32 in training; the torch reference computes it if its rows are not contiguous. ids int64 [n],
    each in [0, v). rows [n, h], bf16 or fp32. All-fp64 tensors are computed by the torch reference too. Raises
    ValueError on wrong shapes, dtypes or devices; ids are not checked.
    """
    _add_rows(total, ids, rows)
