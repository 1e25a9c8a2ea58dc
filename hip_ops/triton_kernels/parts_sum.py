# SPDX-License-Identifier: Apache-2.0
"""The parts of several ranks added up in the order of ranks, in Triton: every part is read once, the sum written once.

Same function as hip_ops.reference.parts_sum, to the bit. Importing this module imports triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hip_ops.triton_kernels.on_device import on

ROW_BYTES = 8192  # of a part in a program: two loads of 16 bytes for each of 256 threads


@triton.jit
def add_up_parts_kernel(out, own, parts, count, row_stride, SIZE: tl.constexpr, RANK: tl.constexpr, BLOCK: tl.constexpr):
    """Elements `at` of all rows. out may be own: what a program reads of it, it alone writes, and later."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    row = parts
    for number in tl.static_range(SIZE):
        part = tl.load((own if number == RANK else row) + at, mask=inside, other=0.0).to(tl.float32)
        if number == 0:
            total = part
        else:
            total += part
        row += row_stride  # by steps of one row, which 32 bits hold where the way to the last row would not fit
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


def add_up_parts_(out: Tensor, own: Tensor, parts: Tensor, rank: int) -> None:
    """As hip_ops.reference.parts_sum.add_up_parts_ of fp32, bf16 or fp16; rows of parts contiguous."""
    (size, count), block = parts.shape, ROW_BYTES // parts.element_size()
    if count == 0:
        return
    with on(own.device):
        add_up_parts_kernel[(triton.cdiv(count, block),)](
            out, own, parts, count, parts.stride(0), SIZE=size, RANK=rank, BLOCK=block, num_warps=256 // (32 if torch.version.hip is None else 64)
        )
