# SPDX-License-Identifier: Apache-2.0
"""The parts of several ranks added up in the order of ranks, in plain torch: the order and the one rounding that every version has, to the bit.

Conventions: out [n], own [n], parts [size, n], of one dtype; row `rank` of parts is not read, `own` stands in its place. `out` may be `own`, not a part of it.
"""

from __future__ import annotations

import torch
from torch import Tensor


def add_up_parts_(out: Tensor, own: Tensor, parts: Tensor, rank: int) -> None:
    """out = the sum of all rows, in fp32 (fp64 of fp64) from row 0 on, rounded once."""
    rows = [own if row == rank else parts[row] for row in range(len(parts))]
    total = rows[0].to(
        torch.promote_types(own.dtype, torch.float32), copy=True
    )  # not 0 + row 0, which would make 0.0 of -0.0
    for row in rows[1:]:
        total += row
    out.copy_(total)
