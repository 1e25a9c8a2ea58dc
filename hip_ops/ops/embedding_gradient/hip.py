# SPDX-License-Identifier: Apache-2.0
"""Host side of embedding_gradient.hip. Same function as reference.py."""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.runtime.launch import aligned, as_rows
from hip_ops.runtime.launchers import call, library, target_of


def add_rows_(total: Tensor, ids: Tensor, rows: Tensor) -> None:
    """As reference.add_rows_; total fp32 of contiguous rows."""
    device, (count, width) = rows.device, rows.shape
    if count and width:
        in_order, order = ids.sort(stable=True)
        run = library(target_of(device)).ho_add_rows_run()
        heads, tails = torch.empty((2, -(-count // run), width), dtype=torch.float32, device=device)
        rows = as_rows(rows)
        call(
            "ho_add_rows", total, in_order, order, rows, heads, tails, count, width, total.stride(0), rows.stride(0),
            rows.element_size(), aligned(total, rows, heads), device=device,
        )
