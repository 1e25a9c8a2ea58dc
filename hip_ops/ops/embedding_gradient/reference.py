# SPDX-License-Identifier: Apache-2.0
"""Adds rows to the rows of a large matrix by their ids, in plain torch, the same bits every time.

torch's kernel for embeddings first sums rows of one id, into as many slots as there are rows. `index_put_` alone would
add them one after the other, which takes milliseconds where thousands of tokens are padding. The host never reads the
number of different ids.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_rows_(total: Tensor, ids: Tensor, rows: Tensor) -> None:
    """Add rows to total[ids] in total's dtype, in place. total [V, h], ids int64 [n] within it, rows [n, h]."""
    if len(ids) == 0:
        return
    in_order, order = ids.sort(stable=True)
    slot_in_order = torch.nn.functional.pad((in_order[1:] != in_order[:-1]).long(), (1, 0)).cumsum(0)
    # Each unused slot adds zeros to some row.
    target = torch.arange(len(ids), device=ids.device).remainder_(len(total)).scatter_(0, slot_in_order, in_order)
    slot = torch.empty_like(ids).scatter_(0, order, slot_in_order)
    sums = torch.ops.aten.embedding_dense_backward(rows.to(total.dtype), slot, len(ids), -1, False)
    total.index_add_(0, target, sums)
