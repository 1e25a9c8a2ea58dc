# SPDX-License-Identifier: Apache-2.0
"""A micro-batch in the form that this rank's model takes: on the device, with document boundaries, cut over
context-parallel ranks.

Every rank reads whole sequences and takes its part, so that the ranks of one sequence agree without communication.
hosts/adapter.py passes the run's arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zaya_plugin.parallel.context_order import ContextShard
from zaya_plugin.parallel.packed_documents import PackedDocuments


@dataclass(frozen=True)
class MicroBatch:
    """tokens, labels, positions int64 [b, s] and loss_mask [b, s] of this rank's rows; packed: boundaries, or None."""

    tokens: Tensor
    labels: Tensor
    positions: Tensor
    loss_mask: Tensor
    packed: PackedDocuments | None


def micro_batch(
    batch: dict[str, Tensor], device, shard: ContextShard, eod: int | None = None, reset_positions: bool = False
) -> MicroBatch:
    """Return this rank's part of a batch of Megatron's GPTDataset.

    Args:
        batch: tokens, labels, position_ids, loss_mask of whole sequences, [b, S], on any device; and document_ends bool
            [b, S], without which documents end at `eod`.
        shard: this rank's part of the sequences.
        eod: the token that ends a document, to compute each document by itself; None: documents attend to each other.
        reset_positions: RoPE counts from the start of each document.
    """
    names = ("tokens", "labels", "position_ids", "loss_mask")
    tokens, labels, positions, mask = (batch[name].to(device, non_blocking=True) for name in names)
    # Before the cut, because the documents of a rank's rows depend on the rows before them.
    packed = None
    if eod is not None:
        ends = batch["document_ends"].to(device, non_blocking=True) if "document_ends" in batch else tokens == eod
        packed = PackedDocuments.from_ends(ends, shard, reset_positions)
    tokens, labels, positions, mask = (shard.take(x, 1) for x in (tokens, labels, positions, mask))
    return MicroBatch(tokens, labels, packed.positions.t() if reset_positions and packed else positions, mask, packed)
