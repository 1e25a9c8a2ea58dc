# SPDX-License-Identifier: Apache-2.0
"""The heads of CCA on a tensor-parallel rank, and its rows of the parameters that every rank holds whole.

Query groups are distributed in order, each with its query heads, so that no attention head needs another rank. The
heads of the values are [current half | delayed half]: with two groups and two ranks the first rank has the current head
and the second rank the delayed head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LocalHeads:
    """The query groups [rank g / ranks, (rank + 1) g / ranks) and their query heads, on one of `ranks` tensor-parallel
    ranks.

    heads, query_groups: numbers in the whole model, n and g.
    head_dim: channels of a head, d.
    """

    rank: int
    ranks: int
    heads: int
    query_groups: int
    head_dim: int

    def of_heads(self, x: Tensor) -> Tensor:
        """Return this rank's rows of x, which has equally many rows for each query group."""
        return x if self.ranks == 1 else x.chunk(self.ranks)[self.rank]

    def of_queries_and_keys(self, x: Tensor) -> Tensor:
        """Return this rank's rows of x [(n + g) d, ...], in the order of the convolutions' channels."""
        if self.ranks == 1:
            return x
        query, key = x.split((self.heads * self.head_dim, self.query_groups * self.head_dim))
        return torch.cat((query.chunk(self.ranks)[self.rank], key.chunk(self.ranks)[self.rank]))

    @property
    def delayed_channels(self) -> int:
        """Number of this rank's value channels that lag one token: those in the second half of all value channels."""
        channels, share = self.query_groups * self.head_dim, self.query_groups * self.head_dim // self.ranks
        return min(share, max((self.rank + 1) * share - channels // 2, 0))

    def of_values(self, current: Tensor, delayed: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of the two halves [g d / 2, ...] of the value channels; one of them may be empty."""
        half, share = len(current), 2 * len(current) // self.ranks
        start, end = self.rank * share, (self.rank + 1) * share
        return current[min(start, half) : min(end, half)], delayed[max(start - half, 0) : max(end - half, 0)]
