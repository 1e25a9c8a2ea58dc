# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a ZAYA step, counted as the model does them. Plain arithmetic.

A multiply-add counts as two operations; causal attention at its average length; the backward pass as twice the
forward; recomputation is not counted, as in every MFU figure. ZAYA1-base at 4,096 tokens: 1.505 (projections,
convolutions, router, expert) + 1.074 (head) + 0.336 (attention) = 2.915 GFLOP a token forward.
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Shape:
    """The sizes that decide parameters and operations. Field names are Megatron's; `vocab_size` is the padded one."""

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    num_query_groups: int
    kv_channels: int
    num_experts: int
    moe_ffn_hidden_size: int
    router_hidden_size: int
    vocab_size: int
    conv_taps: tuple[int, int] = (2, 2)

    @classmethod
    def of_arguments(cls, args) -> Shape:
        """Of Megatron's arguments."""
        names = (field.name for field in fields(cls) if field.name not in ("vocab_size", "conv_taps"))
        return cls(**{name: getattr(args, name) for name in names}, vocab_size=args.padded_vocab_size)

    @property
    def query_channels(self) -> int:
        return self.num_attention_heads * self.kv_channels

    @property
    def key_channels(self) -> int:
        return self.num_query_groups * self.kv_channels


def forward_flops_by_part(shape: Shape, seq_length: int) -> dict[str, float]:
    """Operations of one token's forward pass by part: projections, prologue (both convolutions), attention, router, experts, head."""
    q, k, h, r = shape.query_channels, shape.key_channels, shape.hidden_size, shape.router_hidden_size
    layers = 2.0 * shape.num_layers
    return {
        "projections": layers * (h * q + h * k + h * k + q * h),  # q, k, both values together, output
        "prologue": layers * (q + k) * (shape.conv_taps[0] + shape.kv_channels * shape.conv_taps[1]),
        "attention": layers * 2 * q * (seq_length / 2),
        "router": layers * (h * r + 2 * r * r + r * (shape.num_experts + 1)),
        "experts": layers * 3 * h * shape.moe_ffn_hidden_size,
        "head": 2.0 * h * shape.vocab_size,
    }


def forward_flops_per_token(shape: Shape, seq_length: int) -> dict[str, float]:
    """Operations of one token's forward pass: linear (everything but the other two), attention, head."""
    parts = forward_flops_by_part(shape, seq_length)
    attention, head = parts.pop("attention"), parts.pop("head")
    return {"linear": sum(parts.values()), "attention": attention, "head": head}


def training_flops(shape: Shape, tokens: int, seq_length: int) -> float:
    """Operations of forward and backward over `tokens` tokens in sequences of `seq_length`."""
    return 3.0 * tokens * sum(forward_flops_per_token(shape, seq_length).values())
