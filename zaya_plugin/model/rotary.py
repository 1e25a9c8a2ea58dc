# SPDX-License-Identifier: Apache-2.0
"""RoPE angles by a token's position in the whole sequence, of which this rank may hold a part, or in its own
document.
"""

from __future__ import annotations

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor

from zaya_plugin.parallel.context_order import ContextShard
from zaya_plugin.parallel.packed_documents import PackedDocuments


class ZayaRotaryEmbedding(RotaryEmbedding):
    """Megatron's RotaryEmbedding for any `order` of ContextShard; Megatron's own supports zig-zag only."""

    order: str

    def forward(self, max_seq_len: int, offset: int = 0, packed_seq: bool = False, cp_group=None) -> Tensor:
        """Return angles [s, 1, 1, r] in radians of this rank's rows in a sequence of max_seq_len tokens."""
        group = self.cp_group if cp_group is None else cp_group
        angles = self.get_emb(max_seq_len, offset)
        return angles if group is None else ContextShard.of(group, self.order).take(angles, 0)

    def of_documents(self, packed: PackedDocuments) -> Tensor:
        """Return angles [s, b, 1, r] in radians, counted from the start of each row's document."""
        return self.of_positions(packed.positions)

    def of_positions(self, positions: Tensor) -> Tensor:
        """Return angles [s, b, 1, r] in radians of positions int64 [s, b] (arXiv 2104.09864)."""
        angles = positions.unsqueeze(-1) * self.inv_freq.to(positions.device)
        return torch.cat((angles, angles), dim=-1).unsqueeze(2)
