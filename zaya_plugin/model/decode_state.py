# SPDX-License-Identifier: Apache-2.0
"""State of a layer's attention between the tokens of a text: keys and values of all tokens, and of the last two tokens
the inputs of the convolutions and of the value shift.

transformers' cache holds the same numbers. Written in place and with fixed shapes, so that a captured graph of a step
may hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from zaya_plugin.model.config import ZayaConfig


@dataclass
class Progress:
    """How far b sequences are; one for all layers.

    positions: int64 [b], of the last token of the pass under way. visible: bool [b, 1, 1, t], the stored tokens that a
    step attends to; t is at most the room of the sequences.
    """

    positions: Tensor
    visible: Tensor | None = None

    def show(self, reach: int) -> None:
        """Let a step attend to the tokens up to each sequence's position, among the first `reach` stored ones."""
        stored = torch.arange(reach, device=self.positions.device)
        self.visible = (stored <= self.positions.unsqueeze(1))[:, None, None]


@dataclass
class DecodeState:
    """State of one layer for b sequences, with room for their T last tokens: all of them, or with a sliding window of
    w tokens the last w + 1, each in place of the oldest one. Token p of a sequence has the place p % T.

    z [2, b, C]: queries and keys of the last two tokens before the convolutions. delayed [b, w]: the last token's
    delayed values. keys, values [b, g, T, d].
    """

    z: Tensor
    delayed: Tensor
    keys: Tensor
    values: Tensor
    progress: Progress

    @classmethod
    def empty(
        cls, config: ZayaConfig, batch: int, tokens: int, progress: Progress, window: int | None = None
    ) -> DecodeState:
        """Return the state before the first token, for sequences of at most `tokens`: zeros, as before every sequence.
        window: of the layer.
        """
        groups, d = config.num_query_groups, config.kv_channels

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=config.params_dtype, device=progress.positions.device)

        channels = (config.num_attention_heads + groups) * d
        cache = (batch, groups, tokens if window is None else min(tokens, window + 1), d)
        return cls(zeros(2, batch, channels), zeros(batch, groups * d // 2), zeros(*cache), zeros(*cache), progress)

    def clear(self) -> None:
        """Start new sequences. Old keys and values stay; no token attends to them."""
        self.z.zero_()
        self.delayed.zero_()

    def keep(self, z: Tensor, delayed: Tensor, key: Tensor, value: Tensor) -> None:
        """Add the tokens of a pass: z [s, b, C], delayed [s, b, w], key and value [s, b, g, d].

        With s > 1 these are whole prompts, in an empty state; rows behind a sequence's position are padding.
        """
        positions, rows = self.progress.positions, torch.arange(z.shape[1], device=z.device)
        if len(z) == 1:
            self.z.copy_(torch.cat((self.z[1:], z)))
            self.delayed.copy_(delayed[0])
            places = positions % self.keys.shape[2]
            self.keys[rows, :, places] = key[0]
            self.values[rows, :, places] = value[0]
            return
        before = z[(positions - 1).clamp_min(0), rows].masked_fill((positions == 0).unsqueeze(-1), 0.0)
        self.z.copy_(torch.stack((before, z[positions, rows])))
        self.delayed.copy_(delayed[positions, rows])
        if (room := self.keys.shape[2]) < len(key):  # of each sequence the last tokens, each at its place
            places = torch.arange(room, device=z.device).unsqueeze(1)
            tokens = (positions - (positions - places) % room).clamp_min(0)  # [T, b]; places behind it are not seen
            key, value = key[tokens, rows], value[tokens, rows]
        self.keys[:, :, : len(key)] = key.permute(1, 2, 0, 3)
        self.values[:, :, : len(value)] = value.permute(1, 2, 0, 3)

    def attend(self, query: Tensor, scale: float) -> Tensor:
        """Compute attention of one token a sequence to the stored ones: query [1, b, n, d] -> [1, b, n * d].

        A group's queries are rows of one product, so that keys and values are read once for all of them.
        """
        # Once the room is full every place holds a token of the window.
        visible, (_, batch, heads, d) = self.progress.visible[..., : self.keys.shape[2]], query.shape
        keys, values = (cache[:, :, : visible.shape[-1]] for cache in (self.keys, self.values))
        rows = query.view(batch, keys.shape[1], heads // keys.shape[1], d)
        context = F.scaled_dot_product_attention(rows, keys, values, attn_mask=visible, scale=scale)
        return context.reshape(1, batch, heads * d)
