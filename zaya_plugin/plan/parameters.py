# SPDX-License-Identifier: Apache-2.0
"""Parameters of a ZAYA model by component. Plain arithmetic; ZAYA1-base has 8,840,488,784."""

from __future__ import annotations

from zaya_plugin.plan.flops import Shape


def count_parameters(shape: Shape) -> dict[str, int]:
    """Parameters by component; the tied head is the embedding. Their sum is the model's size."""
    h, r, layers = shape.hidden_size, shape.router_hidden_size, shape.num_layers
    q, k = shape.query_channels, shape.key_channels
    depthwise = (q + k) * (shape.conv_taps[0] + 1)
    grouped = (q + k) * (shape.kv_channels * shape.conv_taps[1] + 1)
    attention = h * q + 2 * h * k + q * h + depthwise + grouped + shape.num_query_groups
    router = (h * r + r) + r + 2 * (r * r + r) + (shape.num_experts + 1) * r
    return {
        "embedding": shape.vocab_size * h,
        "attention": layers * attention,
        "router": layers * router + (layers - 1) * r,  # the first layer has no state to scale
        "experts": layers * shape.num_experts * 3 * h * shape.moe_ffn_hidden_size,
        "norms": (2 * layers + 1) * h,
        "residual_scaling": (8 * layers + 2) * h,
    }


def active_parameters(shape: Shape) -> int:
    """Parameters that one token meets, without the embedding: 753,608,528 for ZAYA1-base."""
    parts = count_parameters(shape)
    return sum(parts.values()) - parts["embedding"] - parts["experts"] * (shape.num_experts - 1) // shape.num_experts
