# SPDX-License-Identifier: Apache-2.0
"""Matrix products over rows sorted by expert: each expert has its own matrix, and the borders of its rows are on the
device.

`grouped_rows` is x[i] @ W[expert of i], forward and, with the transposed matrices, backward to x. `grouped_outer_` is
a_e^T b_e for every expert, added in place to fp32 blocks such as Megatron's main gradients, or written there. Neither
registers gradients: autograd functions such as zaya_plugin.model.experts.ExpertMLP call them in both directions.

Versions, best first: quack on Hopper (faster than Triton in 19 of 21 measured products,
benchmarks/results/quack_tiles-h200.json), Triton, torch's grouped_mm; AITER by name only. The reference, which takes
all dtypes and strides, loops over the experts.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hip_ops.ops.grouped_product import aiter, grouped_mm, reference
from hip_ops.runtime import aiter as runtime_aiter
from hip_ops.runtime.model_sizes import model_sizes
from hip_ops.runtime.operator import Operator
from hip_ops.runtime.quack_tiles import aligned, available
from hip_ops.runtime.self_check import worst

HALF_TYPES = (torch.bfloat16, torch.float16)
AVAILABLE = {
    "quack": available,
    "grouped_mm": grouped_mm.available,
    "aiter": functools.partial(runtime_aiter.available, first=aiter.FIRST_RELEASE),
}


def _offsets(device: torch.device, factor: int = 1) -> Tensor:
    """Make offsets of the model's experts: of five or more one has no rows, one a few, one more than a tile; padding
    rows after them. factor: of all numbers of rows.
    """
    experts = model_sizes().num_experts
    ends = [0, 3, 3, 150, *(150 + 24 * i // (experts - 4) for i in range(1, experts - 4)), 285][-experts:]
    return torch.tensor([factor * end for end in ends], dtype=torch.int32).to(device)


def _operand(device: torch.device, *shape: int) -> Tensor:
    """Make small numbers; rows [304 factor, ..] have NaN in the padding rows."""
    matrix = (torch.randn(shape, device=device) / 16).bfloat16()
    if len(shape) == 2:
        matrix[shape[0] * 285 // 304 :] = torch.nan
    return matrix


def _on_amd() -> bool:
    return torch.version.hip is not None


def _in_a_buffer(tensor: Tensor) -> Tensor:
    """Copy the tensor into a buffer of 2 GiB. DDP's buffers of all parameters are larger, and on AMD Triton compiles
    another kernel for tensors in buffers from 2 GiB on.
    """
    buffer = tensor.new_empty(2**31 // tensor.itemsize)
    return buffer.as_strided(tensor.shape, tensor.stride()).copy_(tensor)


def _rows_example(transposed: bool, k: int = 320, n: int = 144, of_training: bool = False, of_many: bool = False):
    """As in training k is a multiple of the kernels' steps, and n and the tokens are multiples of 16, for which Triton
    compiles another kernel. k: for large ones Triton takes another tile (configs.py). of_training: on AMD the matrices
    lie in a large buffer, with enough tiles that `derived_config` chooses the tile of 16,384 tokens. of_many: the tile of
    32,768, which on AMD is that of few tiles, and on Hopper that of 1,520 rows an expert; also by n.
    """

    def make(device: torch.device) -> tuple:
        large = (of_training or of_many) and _on_amd()
        experts = model_sizes().num_experts
        width, factor = n, 5 * experts if of_many and not large else 1
        if large and not of_many:
            width, factor = 1472, max(1, round(33.2 - 0.263 * experts))
        matrices = _operand(device, experts, width, k).mT if transposed else _operand(device, experts, k, width)
        matrices = _in_a_buffer(matrices) if large else matrices
        return _operand(device, 304 * factor, k), matrices, _offsets(device, factor)

    return make


def _outer_example(dtype: torch.dtype, accumulate: bool, of_training: bool = False):
    """Make operands of a_e^T b_e. of_training: as of `_rows_example`."""

    def make(device: torch.device) -> tuple:
        large = of_training and _on_amd()
        experts = model_sizes().num_experts
        m, n = (128 * -(-80 // experts) - 64, 448) if large else (144, 272)
        a, b, shape = _operand(device, 304, m), _operand(device, 304, n), (experts, m, n)
        out = torch.randn(shape, device=device) if accumulate else torch.full(shape, torch.nan, device=device)
        return _in_a_buffer(out) if large else out.to(dtype), a, b, _offsets(device), accumulate

    return make


def _compare_rows(got: list, want: list, tolerance: float | None) -> str | None:
    """Compare the rows of experts; padding rows are not written."""
    end = int(got[1][2][-1])
    return worst("result", got[0][:end], want[0][:end], tolerance)


_rows = Operator(
    reference.grouped_rows,
    takes="""
        x         [T, k]       bf16|fp16|fp32
        matrices  [E>0, k, n]  =x
        offsets   [E]          int32
    """,
    example=(_rows_example(False), _rows_example(True)),
    more_examples={
        "triton": (
            _rows_example(False, of_training=True),
            _rows_example(True, of_training=True),
            _rows_example(False, k=3072),
            _rows_example(False, of_many=True),
            _rows_example(True, of_many=True),
            _rows_example(True, n=2912, of_many=True),
        )
    },
    compare=_compare_rows,
    written=lambda got: got[0][: int(got[1][2][-1])],
    available=AVAILABLE,
    fits={
        "quack": lambda x, matrices, offsets: x.dtype == torch.bfloat16 and aligned(x, matrices),
        "triton": lambda x, matrices, offsets: x.dtype in HALF_TYPES,
        "grouped_mm": lambda x, matrices, offsets: x.dtype in grouped_mm.DTYPES[x.device.type] and aligned(x, matrices),
        "aiter": aiter.fits_rows,
    },
)
_outer = Operator(
    reference.grouped_outer_,
    takes="""
        out       [E>0, m, n]  wide(a)|=a
        a         [T, m]       bf16|fp16|fp32
        b         [T, n]       =a
        offsets   [E]          int32
    """,
    mutates=("out",),
    example=(
        _outer_example(torch.float32, True),
        _outer_example(torch.float32, False),
        _outer_example(torch.bfloat16, False),
    ),
    more_examples={
        "triton": tuple(_outer_example(torch.float32, accumulate, of_training=True) for accumulate in (True, False))
    },
    tolerances={"grouped_mm": 2.0**-7},  # it rounds products to bf16
    available=AVAILABLE,
    fits={
        "quack": lambda out, a, b, *_: a.dtype == torch.bfloat16 and out.stride(2) == 1 and aligned(out, a, b),
        "triton": lambda out, a, *_: a.dtype in HALF_TYPES and out.stride(2) == 1,
        "grouped_mm": lambda out, a, b, *_: a.dtype in grouped_mm.DTYPES[a.device.type] and aligned(a, b),
        "aiter": aiter.fits_outer,
    },
)


def grouped_rows(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Compute out[i] = x[i] @ matrices[expert of i], summed in fp32.

    Args: x [T, k]; matrices [E, k, n] of x's dtype, or a transposed view of [E, n, k]; offsets int32 [E], the ends of
    the experts' rows. Return [T, n] in x's dtype. Padding rows, at and beyond offsets[-1], are not written (the
    reference writes zeros), and those of x are not read. Raises ValueError on wrong shapes, dtypes or devices.
    """
    return _rows(x, matrices, offsets)


def grouped_outer_(out: Tensor, a: Tensor, b: Tensor, offsets: Tensor, accumulate: bool = True) -> Tensor:
    """Add a[rows of e]^T b[rows of e], summed in fp32, to out[e] in place; without `accumulate` overwrites out[e]
    (zeros for an expert without rows).

    Args: out [E, m, n], fp32 or a's dtype; a [T, m] and b [T, n] of one dtype; offsets int32 [E], the ends of the
    experts' rows. Rows at and beyond offsets[-1] are not read. Return out. Raises ValueError on wrong shapes, dtypes
    or devices.
    """
    _outer(out, a, b, offsets, accumulate)
    return out
