# SPDX-License-Identifier: Apache-2.0
"""Top-1 dispatch on one rank, as torch operators: sorts tokens by expert, moves their rows to the experts and back. The
host never waits.

An order is two inverse maps; negative entries stand for tokens of no expert (reference.py).
All shapes are known beforehand: there are as many rows as tokens, and the padding rows, which belong to no expert, come
last.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from hip_ops.ops.expert_permutation import reference
from hip_ops.runtime.launch import rows_for_a_second
from hip_ops.runtime.model_sizes import model_sizes
from hip_ops.runtime.operator import Operator

MAX_EXPERTS = 256  # of the kernels


class ExpertOrder(NamedTuple):
    """The order of tokens by expert; all tensors int32 on the device.

    token_of_row [n], row_of_token [n]: inverse maps; an entry m < 0 means place ~m, for a token of no expert.
    counts [num_experts]: rows of each expert. offsets [num_experts]: the ends of their rows, as grouped products take
    them.
    """

    token_of_row: Tensor
    row_of_token: Tensor
    counts: Tensor
    offsets: Tensor


def _example_ids(device: torch.device, tokens: int) -> Tensor:
    """Make ids of the model's experts and the skip class; one expert is far more frequent than the others and, of six or
    more, one never occurs.
    """
    experts = _experts()
    ids = torch.randint(0, experts + 8, (tokens,), device=device)
    return torch.where(ids > experts, min(3, experts - 1), torch.where(ids == 5, 4, ids))


def _experts() -> int:
    return min(model_sizes().num_experts, MAX_EXPERTS)


def _example_rows(device: torch.device, many: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rows, token_of_row, row_of_token and probs of the model's hidden size and ZAYA1's dtypes, which run the
    kernels of its training (Triton compiles another one where their number is no multiple of 16); or `many` narrow rows, so that
    a wave takes a second one.
    """
    tokens, hidden = (rows_for_a_second(device), 64) if many else (144, model_sizes().hidden_size)
    token_of_row, row_of_token, _, _ = reference.sort_by_expert(_example_ids(device, tokens), _experts())
    rows, probs = torch.randn(tokens, hidden, device=device).bfloat16(), torch.rand(tokens, device=device)
    return rows, token_of_row, row_of_token, probs


def _example_without_probs(device: torch.device) -> tuple[Tensor, Tensor, Tensor, None]:
    return *_example_rows(device)[:3], None


def _few_experts(expert_ids: Tensor, num_experts: int) -> bool:
    return num_experts <= MAX_EXPERTS


_sort = Operator(
    reference.sort_by_expert,
    takes="expert_ids [n] int32|int64",
    rule=lambda values: (
        (f"num_experts is {values['num_experts']}", "at least 1") if values["num_experts"] < 1 else None
    ),
    example=lambda device: (_example_ids(device, 4080), _experts()),  # 16 tiles, the last one partly filled
    more_examples={"hip": (lambda device: (_example_ids(device, 32_768), _experts()),)},  # two tokens a thread
    fits={"hip": _few_experts, "triton": _few_experts},
)
_gather = Operator(
    reference.gather_rows,
    takes="""
        rows     [n, h]  bf16|fp32
        index    [n]     int32
        inverse  [n]     int32
        probs?   [n]     bf16|fp32
    """,
    example=_example_rows,
    more_examples={
        "hip": (_example_without_probs, functools.partial(_example_rows, many=True)),
        "triton": (_example_without_probs,),
    },
)


def _save_gather(ctx, inputs, output) -> None:
    _, index, inverse, probs = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(index, inverse)
    ctx.has_probs = probs is not None


def _gather_gradients(ctx, grad, d_probs):
    index, inverse = ctx.saved_tensors
    if not ctx.has_probs:
        d_probs = None
    if grad is None and d_probs is None:
        return None, None, None, None
    if grad is None:  # only the probs were used: no rows are moved
        return None, None, None, _gather(d_probs.new_empty(len(index), 0), inverse, index, d_probs)[1]
    d_rows, of_probs = _gather(grad, inverse, index, d_probs)
    return d_rows, None, None, of_probs if d_probs is not None else None


_gather.register_autograd(_gather_gradients, setup_context=_save_gather)


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> ExpertOrder:
    """Sort tokens by expert with a stable counting sort; the result is the same in every run.

    Args: expert_ids int32 or int64 [n]; an id outside [0, num_experts) belongs to no expert. num_experts: 1 or more;
    HIP and Triton take up to 256; for more, the next version runs. Raises ValueError on other shapes or dtypes.
    """
    return ExpertOrder(*_sort(expert_ids, num_experts))


def permute_to_experts(tokens: Tensor, order: ExpertOrder, probs: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Move each token's row, and its prob, to its expert's place; the backward pass moves the gradients back.

    Args: tokens [n, h] bf16 or fp32, rows may be strided; order of sort_by_expert; probs [n] bf16 or fp32, or None.
    Return rows [n, h] in tokens' dtype and row_probs [n] in probs', or None. The padding rows, at and beyond
    order.offsets[-1], are zeros; tokens of no expert are not moved and get zeros as gradient. All-fp64 tensors are
    computed by the torch reference. Raises ValueError on wrong shapes, dtypes or devices.
    """
    rows, row_probs = _gather(tokens, order.token_of_row, order.row_of_token, probs)
    return rows, row_probs if probs is not None else None


def unpermute_from_experts(rows: Tensor, order: ExpertOrder) -> Tensor:
    """Move each row back to its token: tokens [n, h], zeros for tokens of no expert.

    Padding rows, at and beyond order.offsets[-1], are not read and get zeros as gradient. Otherwise as
    permute_to_experts.
    """
    return _gather(rows, order.row_of_token, order.token_of_row, None)[0]
