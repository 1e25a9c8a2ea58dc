# SPDX-License-Identifier: Apache-2.0
"""Grouped products by quack's GEMM on Hopper: CuTe's warp-specialised pipelines.

Each warp has one task, which uses Hopper better than Triton's code, mainly where a product is added to fp32 blocks: the
memory system adds one tile while the next is multiplied. Sums are fp32 and each number is added once, so the bits are
the same in every repetition. All products have one tile, measured on an H200 (TILE,
benchmarks/results/quack_tiles-h200.json). quack's own tuner is not used: it would measure in every process of a run,
and another tile gives other bits.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hip_ops.runtime.quack_tiles import Tile, gemm

TILE = Tile(192, 128, True, 1, 2)


def grouped_rows(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """As reference.grouped_rows, but padding rows are not written."""
    out = x.new_empty(x.shape[0], matrices.shape[2])
    gemm()(x, matrices.mT, out, None, None, cu_seqlens_m=borders(offsets), **TILE.words())
    return out


def grouped_outer_(out: Tensor, a: Tensor, b: Tensor, offsets: Tensor, accumulate: bool) -> None:
    """As reference.grouped_outer_."""
    gemm()(a.mT, b.mT, out, None, None, cu_seqlens_k=borders(offsets), add_to_output=accumulate, **TILE.words())


def borders(offsets: Tensor) -> Tensor:
    """Return int32 [E + 1]: 0 and `offsets`. It is computed once for the products that share `offsets`, and kept as an
    attribute of the tensor.

    A capture does not use borders that were computed before it, because replays would read old values. Offsets that are
    a static input of two captures would get the borders of the first; this project captures whole passes, which compute
    their own offsets.
    """
    if offsets.is_inference():  # counts no versions
        return F.pad(offsets, (1, 0))
    state = offsets._version, offsets.is_cuda and torch.cuda.is_current_stream_capturing()
    kept = getattr(offsets, "borders_of_groups", None)
    if kept is None or kept[0] != state:
        offsets.borders_of_groups = kept = (state, F.pad(offsets, (1, 0)))
    return kept[1]
