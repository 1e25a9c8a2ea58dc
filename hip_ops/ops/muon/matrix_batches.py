# SPDX-License-Identifier: Apache-2.0
"""Stores matrices of one shape together, so that Newton-Schulz takes all layers and experts of one shape in one
batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hip_ops.errors import mistake


class MatrixBatches:
    """One contiguous tensor [batch, m, n] for every shape in `shapes`, with a slot for every matrix.

    shapes: (m, n) of every matrix. Lists of matrices keep this order, also within a batch.
    tensors: list of [batch, m, n], uninitialised, in order of a shape's first appearance: the inputs of
        `newton_schulz`.
    slots: list of [m, n] views into them, one a matrix: the outputs of `muon_momentum_`.
    square_sums: fp32 [matrices], for `muon_momentum_` to fill; `sums()` gives it to `newton_schulz`.
    """

    def __init__(
        self, shapes: Sequence[Sequence[int]], device: torch.device | str, dtype: torch.dtype = torch.bfloat16
    ):
        grouped: dict[tuple[int, int], list[int]] = {}
        for i, shape in enumerate(shapes):
            if len(shape) != 2:
                raise mistake("hip_ops.MatrixBatches", f"shapes[{i}] is {tuple(shape)}", "(m, n)")
            grouped.setdefault(tuple(shape), []).append(i)
        self.places = list(grouped.values())
        self.tensors = [
            torch.empty((len(places), *shape), dtype=dtype, device=device) for shape, places in grouped.items()
        ]
        self.slots = self.split(self.tensors)
        self.square_sums = torch.zeros(len(shapes), dtype=torch.float32, device=device)
        order = [place for places in self.places for place in places]
        self._order = None if order == sorted(order) else torch.tensor(order, device=device)

    def split(self, batches: Sequence[Tensor]) -> list[Tensor]:
        """Split tensors shaped like `self.tensors` into matrices, in the order of `shapes`: the updates of
        `muon_update_`.
        """
        matrices: list[Tensor | None] = [None] * sum(map(len, self.places))
        for like, batch, places in zip(self.tensors, batches, self.places, strict=True):
            if batch.shape != like.shape:
                problem = f"a batch has shape {tuple(batch.shape)}"
                raise mistake("hip_ops.MatrixBatches", problem, str(tuple(like.shape)))
            for place, matrix in zip(places, batch.unbind(0), strict=True):
                matrices[place] = matrix
        return matrices

    def sums(self) -> list[Tensor]:
        """Return `square_sums` by batch, fp32 [batch] each: views where equal shapes are adjacent in `shapes`,
        otherwise copies.
        """
        sums = self.square_sums if self._order is None else self.square_sums.index_select(0, self._order)
        return list(sums.split([len(places) for places in self.places])) if self.places else []
