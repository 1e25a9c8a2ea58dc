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


def block_mask_of(permitted: Callable, batch: int | None, rows: int, keys: int, device: torch.device):
    """Return torch's BlockMask, which skips blocks without a permitted pair, of a function of (sequence, head, query,
    key); batch=None: the same for all sequences.
    """
    make = _create_block_mask(compiled=device.type == "cuda")
    return make(permitted, batch, None, rows, keys, device=str(device))


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

    def mask(self, blocks: bool, part: tuple[int, int, int] | None = None, window: int | None = None):
        """Return which keys a query attends to; made once for all layers.

        blocks: as a BlockMask for torch's flex_attention, else bool [b, 1, s, t], quadratic, for short sequences.
        part: (start, end, first key): the queries are the rows from start to end of the sequence, the keys those from
        the first key to end; None: this rank's rows, and all keys. window: previous tokens that a token sees, None:
        all of its document.
        """
        if (blocks, part, window) not in self._masks:
            self._masks[blocks, part, window] = self._make_mask(blocks, part, window)
        return self._masks[blocks, part, window]

    @cached_property
    def _masks(self) -> dict:
        return {}

    def _make_mask(self, blocks: bool, part: tuple[int, int, int] | None, window: int | None):
        ids, rows, first = self.document_ids, self.rows, 0
        end, reach = ids.shape[1], ids.shape[1] if window is None else window
        if part is not None:
            start, end, first = part
            rows = torch.arange(start, end, device=ids.device)

        def permitted(batch, head, query, key):
            row, key = rows[query], key + first
            return (row >= key) & (row - key <= reach) & (ids[batch, row] == ids[batch, key])

        if blocks:
            return block_mask_of(permitted, len(ids), len(rows), end - first, ids.device)
        sequences, queries, keys = (torch.arange(n, device=ids.device) for n in (len(ids), len(rows), end - first))
        return permitted(sequences[:, None, None], None, queries[:, None], keys).unsqueeze(1)
