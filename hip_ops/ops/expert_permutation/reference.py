# SPDX-License-Identifier: Apache-2.0
"""Top-1 dispatch on one rank in plain torch: the order of tokens by expert, and rows moved along it. The host never
waits.

An order is two inverse maps, token_of_row and row_of_token, int32 [n]. An entry m >= 0 is the place in the other
numbering. An entry m < 0 stands for place ~m (that is -1 - m) of a token that belongs to no expert (the skip class).

Padding rows: there are as many rows as tokens, so that no shape depends on the routing. Tokens of no expert have rows
too, after the rows of all experts. These padding rows are not read; zeros are written in their place.

Shapes: rows [n, h]; index, inverse (its inverse map) and probs [n].
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.runtime.launch import clear_rows_


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return token_of_row [n], row_of_token [n], counts [num_experts] and offsets [num_experts], the ends of the
    experts' rows; all int32.

    expert_ids int32 or int64 [n]; an id outside [0, num_experts) belongs to no expert. Tokens of an expert keep their
    order.
    """
    # num_experts is the class of tokens of no expert
    classes = expert_ids.clamp(-1, num_experts).remainder_(num_experts + 1)
    sorted_classes, order = torch.sort(classes, stable=True)
    experts = torch.arange(num_experts, device=order.device, dtype=classes.dtype)
    offsets = torch.searchsorted(sorted_classes, experts, right=True, out_int32=True)
    counts = offsets - torch.searchsorted(sorted_classes, experts, out_int32=True)
    # -1 for a padding row, else 0: exclusive or with -1 turns m into ~m.
    padding = sorted_classes.div(-num_experts, rounding_mode="trunc")
    rows = torch.arange(len(order), device=order.device).bitwise_xor_(padding).int()
    row_of_token = torch.empty_like(rows).scatter_(0, order, rows)
    return order.bitwise_xor_(padding).int(), row_of_token, counts, offsets


def gather_rows(rows: Tensor, index: Tensor, inverse: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return rows[index] and probs[index], zeros where index is negative. Without probs the second is an empty tensor.

    inverse is not read; the backward pass moves gradients along it.
    """
    places, kept = index.clamp_min(0), index.clamp(-1, 0).bitwise_not_()  # kept: -1 for an entry of an expert, else 0
    moved = clear_rows_(rows.index_select(0, places), kept)
    return moved, rows.new_empty(0) if probs is None else clear_rows_(probs.index_select(0, places), kept)
