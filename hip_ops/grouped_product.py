# SPDX-License-Identifier: Apache-2.0
"""Matrix products over rows sorted by expert, as torch operators: each expert its own matrix, borders on the device.

`grouped_rows` is x[i] @ W[expert of i], forward and, with the transposed matrices, backward to x. `grouped_outer_` is a_e^T b_e for every
expert, added in place to fp32 blocks such as Megatron's main gradients, or written there. Triton in bf16 and fp16; the torch reference,
which takes everything, loops over experts and reads the borders on the host. Neither has gradients of its own: callers write backward passes from them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hip_ops.direct import direct_operator
from hip_ops.operator import Operator, warm_up
from hip_ops.reference import grouped_product as reference
from hip_ops.self_check import difference, worst

HALF = (torch.bfloat16, torch.float16)


def _offsets(device: torch.device) -> Tensor:
    """An expert without rows, one with a few, one with more than a tile; rows of no expert behind them."""
    return torch.tensor([0, 3, 3, 150, 285], dtype=torch.int32).to(device)


def _matrices(device: torch.device, *shape: int) -> Tensor:
    return (torch.randn(shape, device=device) / 16).bfloat16()


def _rows_example(transposed: bool):
    def make(device: torch.device) -> tuple:
        x = _matrices(device, 300, 264)
        x[285:] = float("nan")
        matrices = _matrices(device, 5, 136, 264).mT if transposed else _matrices(device, 5, 264, 136)
        return x, matrices, _offsets(device)

    return make


def _outer_example(device: torch.device) -> tuple:
    a, b = _matrices(device, 300, 136), _matrices(device, 300, 264)
    a[285:], b[285:] = float("nan"), float("nan")
    return torch.randn(5, 136, 264, device=device), a, b, _offsets(device), True


def _compare_rows(got: list, want: list) -> str | None:
    """Of the rows of experts; the others may hold anything."""
    end = int(got[1][2][-1])
    return worst("result", got[0][:end], want[0][:end])


_TRITON = "hip_ops.triton_kernels.grouped_product"
_rows = Operator(
    "grouped_rows",
    torch=reference.grouped_rows,
    triton=f"{_TRITON}:grouped_rows",
    example=_rows_example(False),
    compare=_compare_rows,
)
_rows_transposed = Operator(
    "grouped_rows_transposed",
    torch=reference.grouped_rows,
    triton=f"{_TRITON}:grouped_rows",
    example=_rows_example(True),
    compare=_compare_rows,
)
_outer = Operator(
    "grouped_outer_", torch=reference.grouped_outer_, triton=f"{_TRITON}:grouped_outer_", example=_outer_example
)


@direct_operator("hip_ops::grouped_rows", mutates_args=())
def _rows_op(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    operator = _rows if matrices.stride(2) == 1 else _rows_transposed
    return (operator if x.dtype in HALF else operator.reference)(x, matrices, offsets)


@_rows_op.register_fake
def _(x, matrices, offsets):
    return x.new_empty(x.shape[0], matrices.shape[2])


@direct_operator("hip_ops::grouped_outer_", mutates_args=("out",))
def _outer_op(out: Tensor, a: Tensor, b: Tensor, offsets: Tensor, accumulate: bool) -> None:
    (_outer if a.dtype in HALF else _outer.reference)(out, a, b, offsets, accumulate)


@_outer_op.register_fake
def _(out, a, b, offsets, accumulate):
    return None


def wrong_on(device: torch.device) -> str | None:
    """Why these operators run as loops of torch on `device`, or None where they are kernels. Compares them there now, if nobody has."""
    said = warm_up(device, (_rows, _rows_transposed, _outer))
    wrong = [f"{name}: {result}" for name, result in said.items() if result != "passed"]
    return "; ".join(wrong) or None


def wrong_beside_reference(device: torch.device, rows: Callable, outer_: Callable) -> str | None:
    """What somebody else's `grouped_rows` and `grouped_outer_` get wrong in these operators' self-checks on `device`, or None.

    And where products are written in place of what is there, in fp32 and in the operands' dtype.
    """

    def written(dtype: torch.dtype):
        def make(device: torch.device) -> tuple:
            out, *rest, _ = _outer_example(device)
            return torch.full_like(out, torch.nan, dtype=dtype), *rest, False

        return make

    checks = (
        (_rows, rows, _rows.example),
        (_rows_transposed, rows, _rows_transposed.example),
        (_outer, outer_, _outer.example),
        (_outer, outer_, written(torch.float32)),
        (_outer, outer_, written(torch.bfloat16)),
    )
    wrong = [
        f"{operator.name}: {found}"
        for operator, candidate, example in checks
        if (found := difference(candidate, operator.reference, example, device, compare=operator.compare))
    ]
    return "; ".join(wrong) or None


def _fail(operator: str, name: str, what, must: str):
    raise ValueError(f"hip_ops.{operator}: {name} {what}; it must be {must}")


def _check(operator: str, offsets: Tensor, experts: int, name: str, tensor: Tensor, like: Tensor) -> None:
    if offsets.shape != (experts,) or offsets.dtype != torch.int32 or experts == 0:
        _fail(
            operator,
            "offsets",
            f"is {offsets.dtype} {tuple(offsets.shape)}",
            f"torch.int32 ({max(experts, 1)},), an entry an expert",
        )
    if tensor.device != like.device:
        _fail(operator, name, f"is on {tensor.device}", f"on {like.device}")
    if tensor.dtype != like.dtype:
        _fail(operator, name, f"is {tensor.dtype}", f"{like.dtype}")
    if offsets.device != like.device:
        _fail(operator, "offsets", f"is on {offsets.device}", f"on {like.device}")


def grouped_rows(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """out[i] = x[i] @ matrices[expert of i], summed in fp32.

    Args: x [T, k]; matrices [E, k, n] of x's dtype, or a transposed view of [E, n, k]; offsets int32 [E], the ends of the experts' rows. Returns
    [T, n] in x's dtype; its rows at and beyond offsets[-1] hold anything, and x's do not matter. Raises ValueError on wrong shapes, dtypes or devices.
    """
    if matrices.dim() != 3:
        _fail("grouped_rows", "matrices", f"has shape {tuple(matrices.shape)}", "[E, k, n]")
    if x.dim() != 2 or x.shape[1] != matrices.shape[1]:
        _fail("grouped_rows", "x", f"has shape {tuple(x.shape)}", f"[T, {matrices.shape[1]}]")
    _check("grouped_rows", offsets, matrices.shape[0], "matrices", matrices, x)
    return _rows_op(x, matrices, offsets)


def grouped_outer_(out: Tensor, a: Tensor, b: Tensor, offsets: Tensor, accumulate: bool = True) -> Tensor:
    """out[e] += a[rows of e]^T b[rows of e], summed in fp32, in place; without `accumulate` written there, zeros for an expert without rows.

    Args: out [E, m, n], fp32 or a's dtype; a [T, m] and b [T, n] of one dtype; offsets int32 [E], the ends of the experts' rows. Rows at and
    beyond offsets[-1] do not matter. Returns out. Raises ValueError on wrong shapes, dtypes or devices.
    """
    if out.dim() != 3 or out.stride(2) != 1:
        _fail(
            "grouped_outer_",
            "out",
            f"has shape {tuple(out.shape)} and strides {out.stride()}",
            "[E, m, n] with rows without gaps",
        )
    if out.dtype != a.dtype and out.dtype != torch.promote_types(a.dtype, torch.float32):
        _fail(
            "grouped_outer_",
            "out",
            f"is {out.dtype}",
            f"{torch.promote_types(a.dtype, torch.float32)} or {a.dtype} like a",
        )
    experts, m, n = out.shape
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != m or b.shape[1] != n or a.shape[0] != b.shape[0]:
        _fail(
            "grouped_outer_",
            "a, b",
            f"have shapes {tuple(a.shape)}, {tuple(b.shape)}",
            f"[T, {out.shape[1]}] and [T, {out.shape[2]}]",
        )
    _check("grouped_outer_", offsets, experts, "b", b, a)
    if out.device != a.device:
        _fail("grouped_outer_", "out", f"is on {out.device}", f"on {a.device}")
    _outer_op(out, a, b, offsets, accumulate)
    return out
