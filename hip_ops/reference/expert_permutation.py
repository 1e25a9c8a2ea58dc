# SPDX-License-Identifier: Apache-2.0
"""Top-1 dispatch on one rank in plain torch: the order of tokens by expert, and rows moved along it. Nothing waits for the host.

An order is two maps that are each other's inverse, token_of_row and row_of_token, int32 [n]. An entry m >= 0 is the place in the
other numbering; an entry m < 0 stands for place ~m (that is -1 - m) of a token that belongs to no expert, whose row never travels:
what would be moved along such an entry is zero and is not read. Rows of no expert come behind those of all experts.

Values are moved as they are; a scale is applied in fp32 (fp64 for fp64 tensors) and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64 tensors."""
    return torch.promote_types(tensor.dtype, torch.float32)


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """token_of_row [n], row_of_token [n], counts [num_experts] and offsets [num_experts], the ends of the experts' rows; all int32.

    expert_ids int32 or int64 [n]; an id outside [0, num_experts) is that of no expert. Tokens of an expert keep their order.
    """
    of_an_expert = (expert_ids >= 0) & (expert_ids < num_experts)
    sorted_ids, order = torch.sort(torch.where(of_an_expert, expert_ids, num_experts), stable=True)
    experts = torch.arange(num_experts, device=expert_ids.device, dtype=expert_ids.dtype)
    offsets = torch.searchsorted(sorted_ids, experts, right=True, out_int32=True)
    counts = torch.diff(offsets, prepend=offsets.new_zeros(1))
    order = order.to(torch.int32)
    token_of_row = torch.where(sorted_ids < num_experts, order, ~order)
    rows = torch.arange(len(order), device=order.device, dtype=torch.int32)
    inverse = torch.empty_like(order).scatter_(0, order.long(), rows)
    return token_of_row, torch.where(of_an_expert, inverse, ~inverse), counts, offsets


def _places(index: Tensor) -> tuple[Tensor, Tensor]:
    """Where each entry points, and whether it is one of no expert."""
    nobody = index < 0
    return torch.where(nobody, ~index, index).long(), nobody


def gather_rows(source: Tensor, index: Tensor, side: Tensor | None) -> tuple[Tensor, Tensor]:
    """source[index] and side[index], zeros where index is negative; source [n, h], index [n], side [n] or None (then the second is empty)."""
    places, nobody = _places(index)
    rows = source.index_select(0, places).masked_fill_(nobody.unsqueeze(-1), 0)
    if side is None:
        return rows, source.new_empty(0)
    return rows, side.index_select(0, places).masked_fill_(nobody, 0)


def scale_gather_rows(source: Tensor, index: Tensor, scale: Tensor) -> Tensor:
    """scale[i] * source[index[i]], zeros where index is negative; source [n, h], index [n], scale [n]."""
    places, nobody = _places(index)
    compute = compute_dtype(source)
    rows = source.index_select(0, places).to(compute) * scale.to(compute).unsqueeze(-1)
    return rows.to(source.dtype).masked_fill_(nobody.unsqueeze(-1), 0)


def scale_gather_rows_backward(grad: Tensor, source: Tensor, inverse: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of source and scale in scale_gather_rows, whose index has the inverse map `inverse`; grad and source [n, h]."""
    places, nobody = _places(inverse)
    compute = compute_dtype(source)
    upstream = grad.index_select(0, places).to(compute)
    d_source = (upstream * scale.index_select(0, places).to(compute).unsqueeze(-1)).to(source.dtype)
    dots = (upstream * source.to(compute)).sum(-1).masked_fill_(nobody, 0)
    d_scale = torch.empty_like(dots).scatter_(0, places, dots).to(scale.dtype)
    return d_source.masked_fill_(nobody.unsqueeze(-1), 0), d_scale
