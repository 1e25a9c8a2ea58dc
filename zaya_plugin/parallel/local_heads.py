# SPDX-License-Identifier: Apache-2.0
"""Which heads of CCA a tensor-parallel rank has, and which rows of the parameters that every rank holds whole.

Query groups are dealt out in order, each with its query heads, so that no attention head needs another rank. The heads
of the values are [current half | delayed half]: with two groups and two ranks the first has the current head and the
second the delayed one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LocalHeads:
    """The heads of one of `ranks` tensor-parallel ranks: query groups [rank g / ranks, (rank + 1) g / ranks) and theirs.

    heads and query_groups are those of the whole model, head_dim is in channels.
    """

    rank: int
    ranks: int
    heads: int
    query_groups: int
    head_dim: int

    def of_heads(self, x: Tensor) -> Tensor:
        """This rank's rows of x, which has as many for each query group."""
        return x if self.ranks == 1 else x.chunk(self.ranks)[self.rank]

    def of_queries_and_keys(self, x: Tensor) -> Tensor:
        """This rank's rows of x [(n + g) d, ...], the order of the convolutions' channels."""
        if self.ranks == 1:
            return x
        query, key = x.split((self.heads * self.head_dim, self.query_groups * self.head_dim))
        return torch.cat((query.chunk(self.ranks)[self.rank], key.chunk(self.ranks)[self.rank]))

    @property
    def delayed_channels(self) -> int:
        """How many of this rank's value channels lag one token: those of the second half of all."""
        channels, share = self.query_groups * self.head_dim, self.query_groups * self.head_dim // self.ranks
        return min(share, max((self.rank + 1) * share - channels // 2, 0))

    def of_values(self, current: Tensor, delayed: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's rows of two halves [gd/2, ...] of the value channels; either may come out empty."""
        half, share = len(current), 2 * len(current) // self.ranks
        start, end = self.rank * share, (self.rank + 1) * share
        return current[min(start, half) : min(end, half)], delayed[max(start - half, 0) : max(end - half, 0)]
