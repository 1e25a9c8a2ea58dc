# SPDX-License-Identifier: Apache-2.0
"""Several documents in one sequence, each computed by itself.

The boundaries are passed as Megatron's `packed_seq_params`. The block passes it to every layer, also when a layer is
recomputed for its gradients. Each pipeline stage and each context-parallel rank makes it from its own copy of the
tokens. Sequences keep their shape [b, s]. No shape depends on the number of documents, so no call waits for the host.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from zaya_plugin.parallel.context_order import ContextShard


@functools.cache
def _create_block_mask(compiled: bool) -> Callable:
    """Return torch's create_block_mask. The compiled function does not write the mask of all pairs to memory."""
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask, dynamic=False) if compiled else create_block_mask


@dataclass
class PackedDocuments(PackedSeqParams):
    """Document boundaries of a micro-batch.

    document_ids: int64 [b, S], the number of the document that each token of the whole sequence belongs to.
    shard: this rank's part of the sequence.
    reset_positions: RoPE counts from the start of each document.
    """

    document_ids: Tensor = None
    shard: ContextShard = ContextShard()
    reset_positions: bool = False

    @classmethod
    def from_ends(
        cls, last: Tensor, shard: ContextShard | None = None, reset_positions: bool = False
    ) -> PackedDocuments:
        """Return the boundaries of whole sequences. last: whether a token is the last of its document, bool [b, S]."""
        ends = last.long()
        length = last.shape[1]
        return cls(
            qkv_format="sbhd",
            max_seqlen_q=length,
            max_seqlen_kv=length,
            document_ids=ends.cumsum(1) - ends,
            shard=shard or ContextShard(),
            reset_positions=reset_positions,
        )

    @cached_property
    def rows(self) -> Tensor:
        """Positions int64 [s] of this rank's rows in the sequence."""
        return self.shard.positions(self.document_ids.shape[1], self.document_ids.device)

    @cached_property
    def _first(self) -> Tensor:
        """Whether a token is the first of its document, bool [b, S]."""
        ids = self.document_ids
        first = torch.ones_like(ids, dtype=torch.bool)
        first[:, 1:] = ids[:, 1:] != ids[:, :-1]
        return first

    @cached_property
    def starts(self) -> Tensor:
        """Whether a row is the first of its document, bool [k, c + 1, b]: for each of this rank's k chunks of c rows
        the row before the chunk (True before the sequence), then the chunk's own."""
        first = F.pad(self._first, (1, 0), value=True).t()  # [1 + S, b]
        rows = self.document_ids.shape[1] // self.shard.total_chunks
        return torch.stack([first[chunk * rows : (chunk + 1) * rows + 1] for chunk in self.shard.chunks])

    @cached_property
    def positions(self) -> Tensor:
        """Positions int64 [s, b] of this rank's rows inside their documents."""
        steps = torch.arange(self.document_ids.shape[1], device=self.document_ids.device)
        since = steps - torch.where(self._first, steps, 0).cummax(dim=1).values
        return self.shard.take(since, 1).t()

    @cached_property
    def dense_mask(self) -> Tensor:
        """Whether this rank's row attends to a row of the sequence, bool [b, 1, s, S]. Quadratic; for short
        sequences.
        """
        ids = self.document_ids
        causal = self.rows.unsqueeze(1) >= torch.arange(ids.shape[1], device=ids.device)
        same = ids[:, self.rows].unsqueeze(2) == ids.unsqueeze(1)
        return (causal & same).unsqueeze(1)

    @cached_property
    def block_mask(self):
        """The same mask for torch's flex_attention: a BlockMask, which skips blocks without a permitted pair."""
        ids, rows = self.document_ids, self.rows

        def permitted(batch, head, query, key):
            row = rows[query]
            return (row >= key) & (ids[batch, row] == ids[batch, key])

        return _create_block_mask(compiled=ids.is_cuda)(
            permitted, len(ids), None, len(rows), ids.shape[1], device=str(ids.device)
        )
