# SPDX-License-Identifier: Apache-2.0
"""Causal softmax attention on PyTorch's scaled_dot_product_attention, with Megatron's core-attention interface."""

from __future__ import annotations

import math

import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor, nn


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """softmax(scale * q k^T + causal mask) v with grouped key-value heads.

    Args: query [s, b, n, d], key and value [s, b, g, d] with n a multiple of g. Returns [s, b, n * d].
    """
    query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))  # [b, heads, s, d]
    grouped = query.shape[1] != key.shape[1]
    context = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    return context.permute(2, 0, 1, 3).flatten(2)


class SDPACoreAttention(nn.Module):
    """Core attention without dropout or packing; the mask is causal and `attention_mask` is not read."""

    def __init__(
        self, config: TransformerConfig, layer_number: int, attn_mask_type: AttnMaskType, attention_type: str,
        attention_dropout: float | None = None, softmax_scale: float | None = None, cp_comm_type: str | None = None,
        pg_collection=None,
    ):
        super().__init__()
        assert attn_mask_type == AttnMaskType.causal and attention_type == "self"
        assert not (attention_dropout or config.attention_dropout)
        self.softmax_scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None, attention_bias: Tensor | None = None, packed_seq_params=None,
    ) -> Tensor:
        """query [s, b, n, d], key and value [s, b, g, d] -> [s, b, n * d]."""
        assert attention_bias is None and packed_seq_params is None
        return causal_attention(query, key, value, self.softmax_scale)
