# SPDX-License-Identifier: Apache-2.0
"""The parts that several ranks have of a sum, added up in the order of ranks, as a torch operator.

Triton, and the torch reference, which takes fp64 too; there is no HIP version. All have the same bits. Conventions are in hip_ops/reference/parts_sum.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from hip_ops.direct import direct_operator
from hip_ops.operator import Operator, warm_up
from hip_ops.reference import parts_sum as reference

logger = logging.getLogger("hip_ops")


def _example(device: torch.device) -> tuple:
    """Five rows with gaps, three programs of the kernel of which the last is short, NaN in the row that is not to be read."""
    parts = torch.randn(5, 5000, device=device)[:, :4200]
    parts[2] = torch.nan
    return torch.zeros(4200, device=device), torch.randn(4200, device=device), parts, 2


_add_up_parts = Operator(
    "add_up_parts",
    torch=reference.add_up_parts_,
    triton="hip_ops.triton_kernels.parts_sum:add_up_parts_",
    example=_example,
    tolerance=0.0,
)


@direct_operator("hip_ops::add_up_parts", mutates_args=("out",))
def add_up_parts_(out: Tensor, own: Tensor, parts: Tensor, rank: int) -> None:
    """out = the sum of the rows of `parts`, with `own` in place of row `rank`: in fp32, one after the other from row 0 on, rounded once.

    Args:
        out: [n], may be `own` itself. own: [n]. parts: [size, n] of contiguous rows at any distance; row `rank` is not read.
            All fp32, bf16 or fp16 (or fp64, summed in fp64), one dtype.
    """
    dtypes = out.dtype, own.dtype, parts.dtype
    assert own.dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64) and len(set(dtypes)) == 1, dtypes
    assert out.dim() == 1 and out.shape == own.shape == parts.shape[1:] and 0 <= rank < len(parts), (
        out.shape,
        own.shape,
        parts.shape,
        rank,
    )
    assert own.numel() < 2 or out.stride(0) == own.stride(0) == parts.stride(1) == 1, (
        out.stride(),
        own.stride(),
        parts.stride(),
    )
    (reference.add_up_parts_ if own.dtype == torch.float64 else _add_up_parts)(out, own, parts, rank)


@add_up_parts_.register_fake
def _(out, own, parts, rank):
    return None


def adder_on(device: torch.device) -> Callable[[Tensor, Tensor, Tensor, int], None]:
    """`add_up_parts_`, compared with torch on `device` now, if nobody has, so that a graph may be captured that calls it.

    Triton still compiles at the first call with other sizes, ranks, dtypes or alignments, as a step ahead of a capture has them. Where a backend was asked
    for by name that has no version of it, the reference, which has the same bits and is slower.
    """
    said = warm_up(device, (_add_up_parts,))[_add_up_parts.name]
    if said.endswith(" version"):  # "no hip version"
        logger.warning("hip_ops: %s has %s; torch runs instead, slower", _add_up_parts.name, said)
        return reference.add_up_parts_
    return add_up_parts_
