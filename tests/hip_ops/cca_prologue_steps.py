# SPDX-License-Identifier: Apache-2.0
"""cca_prologue token by token: each call gets the rows before it as a halo."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import hip_ops


@dataclass
class StepState:
    """The rows before the next token: conv [2, b, C], the last two rows of z, and value [b, w], the last delayed
    values.

    transformers' cache holds the same numbers as conv state [b, C, 2] and recurrent state [b, w].
    """

    conv: Tensor
    value: Tensor

    @classmethod
    def empty(
        cls, batch: int, channels: int, delayed_channels: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> StepState:
        """Returns the state before a sequence: zeros."""
        return cls(
            torch.zeros(2, batch, channels, dtype=dtype, device=device),
            torch.zeros(batch, delayed_channels, dtype=dtype, device=device),
        )

    def advance(self, projected: Tensor) -> None:
        """Advances the state by the tokens projected [t, b, C + g d], in place, so that a captured graph may hold
        it.
        """
        channels, delayed = self.conv.shape[-1], self.value.shape[-1]
        self.conv.copy_(torch.cat((self.conv, projected[-2:, :, :channels]))[-2:])
        self.value.copy_(projected[-1, :, projected.shape[-1] - delayed :])


def prologue_step(
    projected: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    grouped_weight: Tensor,
    grouped_bias: Tensor,
    temperature: Tensor,
    rope: Tensor | None = None,
    *,
    query_groups: int,
    state: StepState,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns query, key and value, as cca_prologue, of the next t >= 1 tokens of b sequences, projected [t, b, C + g
    d]; `state` advances in place.

    A prompt is the first step, from the empty state. No gradients.
    """
    with torch.no_grad():
        found = hip_ops.cca_prologue(
            projected,
            depthwise_weight,
            depthwise_bias,
            grouped_weight,
            grouped_bias,
            temperature,
            rope,
            query_groups=query_groups,
            delayed_channels=state.value.shape[-1],
            halo=state.conv.unsqueeze(0),
            value_halo=state.value.unsqueeze(0),
        )
        if len(projected):
            state.advance(projected)
    return found
