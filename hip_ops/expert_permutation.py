# SPDX-License-Identifier: Apache-2.0
"""Top-1 dispatch on one rank, as torch operators: sort tokens by expert, move their rows there and back. Nothing waits for the host.

What an order is - two inverse maps whose negative entries stand for tokens of no expert - is in hip_ops/reference/expert_permutation.py.
Every shape is known beforehand: there are as many rows as tokens, and those of no expert come last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hip_ops.direct import direct_operator
from hip_ops.operator import Operator
from hip_ops.reference import expert_permutation as reference

DTYPES = (torch.bfloat16, torch.float32)
MODULE = "expert_permutation"


class ExpertOrder(NamedTuple):
    """Tokens by expert; all int32 on the device.

    token_of_row [n], row_of_token [n]: inverse maps; an entry m < 0 is place ~m, of a token that belongs to no expert.
    counts [num_experts]: rows of each expert. offsets [num_experts]: their ends, as grouped matrix products take them.
    """

    token_of_row: Tensor
    row_of_token: Tensor
    counts: Tensor
    offsets: Tensor


def _operator(name: str, example) -> Operator:
    return Operator(
        name,
        torch=getattr(reference, name),
        triton=f"hip_ops.triton_kernels.{MODULE}:{name}",
        hip=f"hip_ops.hip_kernels.{MODULE}:{name}",
        example=example,
    )


def _example_ids(device: torch.device, tokens: int) -> Tensor:
    """ZAYA1's 16 experts and the skip class, one expert far more often than the others and one never."""
    ids = torch.randint(0, 24, (tokens,), device=device)
    return torch.where(ids > 16, 3, torch.where(ids == 5, 4, ids))


def _example_rows(kind: str):
    """ZAYA1's hidden size and dtypes, hence the kernels that it trains with."""

    def make(device: torch.device) -> tuple:
        tokens, hidden = 150, 2048
        token_of_row, row_of_token, _, _ = reference.sort_by_expert(_example_ids(device, tokens), 16)
        rows, probs = torch.randn(tokens, hidden, device=device).bfloat16(), torch.rand(tokens, device=device)
        if kind == "gather":
            return rows, token_of_row, probs
        if kind == "scale":
            return rows, row_of_token, probs
        return torch.randn(tokens, hidden, device=device).bfloat16(), rows, token_of_row, probs

    return make


_sort = _operator("sort_by_expert", lambda device: (_example_ids(device, 5000), 16))
_gather = _operator("gather_rows", _example_rows("gather"))
_scale_gather = _operator("scale_gather_rows", _example_rows("scale"))
_scale_gather_backward = _operator("scale_gather_rows_backward", _example_rows("backward"))


def _chosen(operator: Operator, like: Tensor):
    """fp64 is for checking and runs in plain torch."""
    return operator.reference if like.dtype == torch.float64 else operator


@direct_operator("hip_ops::sort_by_expert", mutates_args=())
def _sort_op(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _sort(expert_ids, num_experts)


@_sort_op.register_fake
def _(expert_ids, num_experts):
    sizes = (*expert_ids.shape,) * 2 + (num_experts,) * 2
    return tuple(expert_ids.new_empty(size, dtype=torch.int32) for size in sizes)


@direct_operator("hip_ops::gather_rows", mutates_args=())
def _gather_op(source: Tensor, index: Tensor, inverse: Tensor, side: Tensor | None) -> tuple[Tensor, Tensor]:
    # `inverse` is for the backward, which is a gather too.
    return _chosen(_gather, source)(source, index, side)


@_gather_op.register_fake
def _(source, index, inverse, side):
    return source.new_empty(source.shape), source.new_empty(0) if side is None else side.new_empty(side.shape)


def _save_gather(ctx, inputs, output) -> None:
    source, index, inverse, side = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(index, inverse)
    ctx.rows, ctx.has_side = source.shape, side is not None


def _gather_gradients(ctx, grad, d_side):
    index, inverse = ctx.saved_tensors
    if not ctx.has_side:
        d_side = None
    if grad is None and d_side is None:
        return None, None, None, None
    if grad is None:  # only the side was used: no row to move
        return None, None, None, _gather_op(d_side.new_empty(len(index), 0), inverse, index, d_side)[1]
    d_source, of_side = _gather_op(grad, inverse, index, d_side)
    return d_source, None, None, of_side if d_side is not None else None


_gather_op.register_autograd(_gather_gradients, setup_context=_save_gather)


@direct_operator("hip_ops::scale_gather_rows", mutates_args=())
def _scale_gather_op(source: Tensor, index: Tensor, inverse: Tensor, scale: Tensor) -> Tensor:
    return _chosen(_scale_gather, source)(source, index, scale)


@_scale_gather_op.register_fake
def _(source, index, inverse, scale):
    return source.new_empty(source.shape)


@direct_operator("hip_ops::scale_gather_rows_backward", mutates_args=())
def _scale_gather_backward_op(grad: Tensor, source: Tensor, inverse: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    return _chosen(_scale_gather_backward, source)(grad, source, inverse, scale)


@_scale_gather_backward_op.register_fake
def _(grad, source, inverse, scale):
    return source.new_empty(source.shape), scale.new_empty(scale.shape)


def _save_scale_gather(ctx, inputs, output) -> None:
    source, _, inverse, scale = inputs
    ctx.save_for_backward(source, inverse, scale)


def _scale_gather_gradients(ctx, grad):
    source, inverse, scale = ctx.saved_tensors
    d_source, d_scale = _scale_gather_backward_op(grad, source, inverse, scale)
    return d_source, None, None, d_scale


_scale_gather_op.register_autograd(_scale_gather_gradients, setup_context=_save_scale_gather)


def _agree(rows: Tensor, order: ExpertOrder, probs: Tensor | None) -> bool:
    """Whether these are all right, in bf16 and fp32. Else `_check` finds what is wrong, if anything is."""
    count, device = rows.shape[:1], rows.device
    for index in order[:2]:
        if index.shape != count or index.dtype != torch.int32 or index.device != device:
            return False
    if probs is not None and not (probs.shape == count and probs.dtype in DTYPES and probs.device == device):
        return False
    return rows.dim() == 2 and rows.dtype in DTYPES


def _check(operator: str, name: str, rows: Tensor, order: ExpertOrder, probs: Tensor | None) -> None:
    """Raises ValueError unless rows are [n, h] and probs [n], of the order's n and device, in dtypes that there are kernels for."""
    if rows.dim() != 2:
        raise ValueError(f"hip_ops.{operator}: {name} has shape {tuple(rows.shape)}; it must be [n, h]")
    tensors = {"order.token_of_row": order.token_of_row, "order.row_of_token": order.row_of_token}
    tensors |= {} if probs is None else {"probs": probs}
    for what, tensor in tensors.items():
        if tensor.shape != rows.shape[:1]:
            raise ValueError(
                f"hip_ops.{operator}: {what} has shape {tuple(tensor.shape)}; it must be {tuple(rows.shape[:1])}, one entry a row of {name}"
            )
        if tensor.device != rows.device:
            raise ValueError(
                f"hip_ops.{operator}: {what} is on {tensor.device}; it must be on {rows.device} like {name}"
            )
        if what != "probs" and tensor.dtype != torch.int32:
            raise ValueError(
                f"hip_ops.{operator}: {what} is {tensor.dtype}; it must be torch.int32, as sort_by_expert makes it"
            )
    floats = {name: rows} | ({} if probs is None else {"probs": probs})
    all_fp64 = all(tensor.dtype == torch.float64 for tensor in floats.values())
    for what, tensor in floats.items():
        if tensor.dtype not in DTYPES and not all_fp64:
            raise ValueError(
                f"hip_ops.{operator}: {what} is {tensor.dtype}; it must be torch.bfloat16 or torch.float32 (or all tensors torch.float64)"
            )


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> ExpertOrder:
    """The order of tokens by expert, stable: tokens of one expert keep theirs. A counting sort, the same bits every time.

    Args: expert_ids int32 or int64 [n], where an id outside [0, num_experts) is that of no expert; num_experts, with kernels up to 256.
    Raises ValueError on other shapes or dtypes.
    """
    if expert_ids.dim() != 1:
        raise ValueError(f"hip_ops.sort_by_expert: expert_ids has shape {tuple(expert_ids.shape)}; it must be [n]")
    if expert_ids.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"hip_ops.sort_by_expert: expert_ids is {expert_ids.dtype}; it must be torch.int32 or torch.int64"
        )
    if num_experts < 1:
        raise ValueError(f"hip_ops.sort_by_expert: num_experts is {num_experts}; it must be at least 1")
    return ExpertOrder(*_sort_op(expert_ids, num_experts))


def permute_to_experts(tokens: Tensor, order: ExpertOrder, probs: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Each token's row, and its prob, to its expert's place; the gradients travel back the same way.

    Args: tokens [n, h] bf16 or fp32, rows may be strided; order of sort_by_expert; probs [n] bf16 or fp32, or None.
    Returns rows [n, h] in tokens' dtype and row_probs [n] in probs', or None. Rows at and beyond order.offsets[-1] are zeros: tokens of no
    expert do not travel, and get zeros as gradient. All-fp64 tensors run in plain torch. Raises ValueError on wrong shapes, dtypes or devices.
    """
    if not _agree(tokens, order, probs):
        _check("permute_to_experts", "tokens", tokens, order, probs)
    rows, row_probs = _gather_op(tokens, order.token_of_row, order.row_of_token, probs)
    return rows, row_probs if probs is not None else None


def unpermute_from_experts(rows: Tensor, order: ExpertOrder, probs: Tensor | None = None) -> Tensor:
    """The way back: tokens [n, h], scaled by probs [n] (in the order of tokens) where they are given; zeros for tokens of no expert.

    Rows at and beyond order.offsets[-1] are not read, whatever they hold, and get zeros as gradient. Else as permute_to_experts.
    """
    if not _agree(rows, order, probs):
        _check("unpermute_from_experts", "rows", rows, order, probs)
    if probs is None:
        return _gather_op(rows, order.row_of_token, order.token_of_row, None)[0]
    return _scale_gather_op(rows, order.row_of_token, order.token_of_row, probs)
