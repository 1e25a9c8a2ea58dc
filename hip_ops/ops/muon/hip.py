# SPDX-License-Identifier: Apache-2.0
"""Host side of hip_ops/ops/muon/muon.hip: one launch for every combination of dtypes in the lists."""

from __future__ import annotations

import torch

from hip_ops.ops.muon.multi_tensor import blocks_for, work_tables
from hip_ops.runtime.launchers import call


def muon_momentum_(gradients, momenta, outputs, square_sums, grad_scale, found_inf, momentum, nesterov) -> None:
    """As reference.muon_momentum_."""
    device = gradients[0].device
    for dtypes, table in work_tables([gradients, momenta, outputs]):
        partials = (
            None if square_sums is None else torch.empty(max(1, table.chunks), dtype=torch.float32, device=device)
        )
        call(
            "ho_muon_momentum", table.data, table.tensors, table.chunks, table.chunk_elements, blocks_for(table),
            *(dtype.itemsize for dtype in dtypes), grad_scale, found_inf, partials, square_sums, momentum, 1 - momentum,
            nesterov, True, device=device,
        )


def muon_update_(updates, masters, params, scales, lr, lr_tensor, weight_decay, found_inf) -> None:
    """As reference.muon_update_."""
    device = params[0].device
    columns = [updates, masters, params] if masters else [updates, params]
    for dtypes, table in work_tables(columns, scales):
        sizes = [dtype.itemsize for dtype in dtypes] + [0] * (3 - len(dtypes))
        call(
            "ho_muon_update", table.data, table.tensors, table.chunks, table.chunk_elements, blocks_for(table),
            *sizes, found_inf, lr_tensor, lr, weight_decay, device=device,
        )
