# SPDX-License-Identifier: Apache-2.0
"""The rows of a sequence that a context-parallel rank holds, and their order.

A sequence is cut into equal chunks of neighbouring rows. `contiguous`: one chunk a rank. `zigzag`, Megatron's
load-balanced order: 2 * size chunks; rank r holds the chunks r and 2 * size - 1 - r, so that all ranks have the same
share of the causal triangle. A chunk's slot is its position in the concatenation of all ranks' rows. Torch is imported
by the functions that take tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from zaya_plugin.ground.errors import mistake

if TYPE_CHECKING:
    import torch
    from torch import Tensor

ORDERS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class ContextShard:
    """One rank's part of a sequence. order: one of ORDERS; size and rank: of the context-parallel group."""

    order: str = "zigzag"
    size: int = 1
    rank: int = 0

    def __post_init__(self):
        if self.order not in ORDERS:
            raise mistake(
                "parallel.context_parallel_order", self.order, problem="not a valid order", allowed=", ".join(ORDERS)
            )
        assert 0 <= self.rank < self.size

    @classmethod
    def of(cls, group, order: str) -> ContextShard:
        """Return the part of this process in `group`."""
        return cls(order, group.size(), group.rank())

    @property
    def chunks(self) -> tuple[int, ...]:
        """Numbers of this rank's chunks, from the start of the sequence, in the order of its rows."""
        return self.chunks_of(self.rank)

    @property
    def total_chunks(self) -> int:
        """Number of chunks of the whole sequence."""
        return self.size * len(self.chunks)

    @functools.cached_property
    def slots(self) -> tuple[int, ...]:
        """Slot of each chunk of the sequence, from its start."""
        held = [chunk for rank in range(self.size) for chunk in self.chunks_of(rank)]
        return tuple(held.index(chunk) for chunk in range(self.total_chunks))

    @property
    def previous_slots(self) -> tuple[int | None, ...]:
        """Slot of the chunk before each of this rank's chunks; None at the start of the sequence."""
        return tuple(self.slots[chunk - 1] if chunk else None for chunk in self.chunks)

    @property
    def next_slots(self) -> tuple[int | None, ...]:
        """Slot of the chunk after each of this rank's chunks; None at the end of the sequence."""
        return tuple(self.slots[chunk + 1] if chunk + 1 < self.total_chunks else None for chunk in self.chunks)

    def starts(self, local_rows: int) -> tuple[int, ...]:
        """Return the position in the sequence of the first row of each of this rank's chunks."""
        rows = local_rows // len(self.chunks)
        return tuple(chunk * rows for chunk in self.chunks)

    def positions(self, length: int, device: torch.device | str | None = None) -> Tensor:
        """Return the positions, int64 [length / size], of this rank's rows in a sequence of `length` rows."""
        import torch

        return self.take(torch.arange(length, device=device), 0)

    def take(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's rows of x, which holds the whole sequence along `dim`; x itself if there is one rank.

        Raises:
            ValueError: the sequence cannot be cut into equal chunks.
        """
        import torch

        if self.size == 1:
            return x
        if x.shape[dim] % self.total_chunks:
            raise mistake(
                "parallel.context_parallel_size",
                self.size,
                problem=f"{x.shape[dim]} rows cannot be cut into {self.total_chunks} equal chunks ({self.order} order)",
                allowed=f"a multiple of {self.total_chunks} rows",
            )
        pieces = x.chunk(self.total_chunks, dim)
        return torch.cat([pieces[chunk] for chunk in self.chunks], dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Return the whole sequence from all ranks' rows, the inverse of `take`."""
        import torch

        pieces = [piece for part in parts for piece in part.chunk(len(self.chunks), dim)]
        return torch.cat([pieces[slot] for slot in self.slots], dim)

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of a rank's chunks, in the order of its rows."""
        if self.order == "contiguous" or self.size == 1:
            return (rank,)
        return rank, 2 * self.size - 1 - rank
