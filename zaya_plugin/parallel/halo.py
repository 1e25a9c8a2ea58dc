# SPDX-License-Identifier: Apache-2.0
"""The rows that context-parallel ranks send each other for attention with a sliding window. No torch import."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from zaya_plugin.parallel.context_order import ContextShard


@dataclass(frozen=True)
class Halo:
    """The rows before each chunk that the chunk's queries reach with a sliding window, and who sends them.

    shard: this rank's part of the sequence. rows: of a chunk. window: rows before a query that it reaches.
    """

    shard: ContextShard
    rows: int
    window: int

    def needed(self, rank: int) -> list[list[tuple[int, int, int]]]:
        """Return for each chunk of `rank` the pieces before it, in order: owner, first and last (excluded) of the
        owner's rows.
        """
        needed = []
        for chunk in self.shard.chunks_of(rank):
            start, pieces = chunk * self.rows, []
            first = max(start - self.window, 0)
            for other in range(first // self.rows, chunk):
                owner, place = divmod(self.shard.slots[other], len(self.shard.chunks))
                offset = (place - other) * self.rows
                pieces.append((owner, max(first, other * self.rows) + offset, (other + 1) * self.rows + offset))
            needed.append(pieces)
        return needed

    def sent(self, sender: int, reader: int) -> list[slice]:
        """Return the slices of `sender`'s rows that it sends to `reader`."""
        pieces = [piece for of_chunk in self.needed(reader) for piece in of_chunk]
        return [slice(first, last) for owner, first, last in pieces if owner == sender != reader]

    def counts(self, sender: int) -> list[int]:
        """Return the number of rows that `sender` sends to each rank."""
        ranks = range(self.shard.size)
        return [sum(part.stop - part.start for part in self.sent(sender, reader)) for reader in ranks]

    @property
    def received(self) -> list[int]:
        """Number of rows that this rank receives from each rank."""
        return [self.counts(sender)[self.shard.rank] for sender in range(self.shard.size)]

    @functools.cached_property
    def reach(self) -> float:
        """Keys that the attention of a rank has for each of its own rows, at most: its own and those that it receives,
        or all of the sequence where these are not more.
        """
        received = map(sum, zip(*map(self.counts, range(self.shard.size)), strict=True))
        return min(1 + max(received) / (len(self.shard.chunks) * self.rows), self.shard.size)

    @property
    def is_shorter(self) -> bool:
        """Whether every rank receives fewer rows than by gathering the sequence."""
        return self.reach < self.shard.size

    @functools.cached_property
    def plan(self) -> tuple[list[int], list[int], list[slice], list[list[slice]]]:
        """Return the rows sent to each rank and received from each; the slices of this rank's rows that it sends; and
        for each of its chunks the slices of (its own rows, the received ones) that are the halo and the chunk.
        """
        shard, received = self.shard, self.received
        own = len(shard.chunks) * self.rows
        at = [own + sum(received[:rank]) for rank in range(shard.size)]  # the next piece of each sender
        chunks = []
        for place, pieces in enumerate(self.needed(shard.rank)):
            slices = []
            for owner, first, last in pieces:
                if owner == shard.rank:
                    slices.append(slice(first, last))
                else:
                    slices.append(slice(at[owner], at[owner] + last - first))
                    at[owner] += last - first
            chunks.append([*slices, slice(place * self.rows, (place + 1) * self.rows)])
        sent = [part for reader in range(shard.size) for part in self.sent(shard.rank, reader)]
        return self.counts(shard.rank), received, sent, chunks


@functools.lru_cache(maxsize=16)  # one for each length of a run and window
def halo(shard: ContextShard, rows: int, window: int) -> Halo:
    """Return the Halo of these fields, whose plan is then made once."""
    return Halo(shard, rows, window)
