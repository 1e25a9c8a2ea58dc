# SPDX-License-Identifier: Apache-2.0
"""An embedding's gradient added to a main gradient row by row, as a torch operator.

Conventions are in hip_ops/reference/embedding_gradient.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.direct import direct_operator
from hip_ops.operator import Operator
from hip_ops.reference import embedding_gradient as reference


def _example(device: torch.device) -> tuple:
    """Ids that come once, some times, and more often than a program of the kernel takes rows, in any order."""
    ids = torch.cat((torch.randint(50, (300,)), torch.full((200,), 7), torch.tensor([0, 49]))).to(device)
    return (
        torch.randn(50, 1100, device=device),
        ids[torch.randperm(len(ids)).to(device)],
        torch.randn(len(ids), 1100, device=device).bfloat16(),
    )


_add_rows = Operator(
    "add_rows",
    torch=reference.add_rows_,
    triton="hip_ops.triton_kernels.embedding_gradient:add_rows_",
    hip="hip_ops.hip_kernels.embedding_gradient:add_rows_",
    example=_example,
    tolerance=1e-5,
)


@direct_operator("hip_ops::add_rows", mutates_args=("total",))
def add_rows_(total: Tensor, ids: Tensor, rows: Tensor) -> None:
    """total[ids] += rows, in place and the same bits every time: rows of one id are summed in fp32 in their order before they are added.

    Args:
        total: [V, h] of contiguous rows, fp32 in training. ids: int64 [n], each in [0, V). rows: [n, h], bf16 or fp32.
    """
    assert rows.dtype in (torch.bfloat16, torch.float32, torch.float64), rows.dtype
    assert total.stride(1) == 1 or total.shape[1] < 2, f"total has strides {total.stride()}"
    (reference.add_rows_ if torch.float64 in (total.dtype, rows.dtype) else _add_rows)(total, ids, rows)


@add_rows_.register_fake
def _(total, ids, rows):
    return None
