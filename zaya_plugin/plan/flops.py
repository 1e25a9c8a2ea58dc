# SPDX-License-Identifier: Apache-2.0
"""Sizes, parameters and floating-point operations of a ZAYA model. Plain arithmetic.

ZAYA1-base has 8,840,488,784 parameters. A multiply-add counts as two operations; causal attention counts at its average
length, that of the window where a layer has one; the backward pass as twice the forward, or once for the products of
frozen weights, whose own gradient is not computed; recomputation is not counted, as in every MFU figure. ZAYA1-base at
4,096 tokens: 1.505 (projections, convolutions, router, expert) + 1.074 (head) + 0.336 (attention) = 2.915 GFLOP for a
token forward.
"""

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Shape:
    """The sizes that parameters and operations depend on. Field names are Megatron's; `vocab_size` is the
    padded one. lora_rank, lora_targets, lora_experts: of the adapters (optim.lora); None: all weights are trained.
    """

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
    normalization: str = "RMSNorm"
    sliding_window: int | None = None
    window_attn_skip_freq: int | None = None
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] = ()
    lora_experts: str = "each"

    @classmethod
    def of_arguments(cls, args) -> "Shape":
        """Return the sizes in Megatron's arguments."""
        names = {field.name for field in fields(cls)} - {"vocab_size", "conv_taps", "lora_targets"}
        values = {name: getattr(args, name) for name in names}
        return cls(**values, vocab_size=args.padded_vocab_size, lora_targets=tuple(args.lora_targets))

    @property
    def norm_vectors(self) -> int:
        """Parameters of a norm a channel, and numbers a row that it keeps for the backward pass."""
        return 2 if self.normalization == "LayerNorm" else 1

    @property
    def window_layers(self) -> int:
        """Layers with a sliding window: all but each window_attn_skip_freq-th."""
        if self.sliding_window is None:
            return 0
        return self.num_layers - (self.num_layers // self.window_attn_skip_freq if self.window_attn_skip_freq else 0)

    def seen_tokens(self, seq_length: int) -> float:
        """Return the keys that a token sees on average, summed over the layers: half of the sequence, or, with a window
        of w previous tokens, w - w^2 / (2 seq_length).
        """
        window = min(self.sliding_window or seq_length, seq_length)
        whole = self.num_layers - self.window_layers
        return whole * seq_length / 2 + self.window_layers * (window - window**2 / (2 * seq_length))

    def cached_tokens(self, context: int) -> float:
        """Return the keys that a token behind `context` others reads when it is decoded, summed over the layers: those of
        its window where the layer has one.
        """
        whole = self.num_layers - self.window_layers
        return whole * context + self.window_layers * min(self.sliding_window or context, context)

    @property
    def expert_adapters(self) -> int:
        """Adapters of each of the experts' two matrices in a layer."""
        return self.num_experts if self.lora_experts == "each" else 1

    @property
    def query_channels(self) -> int:
        return self.num_attention_heads * self.kv_channels

    @property
    def key_channels(self) -> int:
        return self.num_query_groups * self.kv_channels


def forward_flops_by_part(shape: Shape, seq_length: int) -> dict[str, float]:
    """Return operations of one token's forward pass by part: projections, prologue (both convolutions), attention,
    router, experts, head.
    """
    q, k, h, r = shape.query_channels, shape.key_channels, shape.hidden_size, shape.router_hidden_size
    layers = 2.0 * shape.num_layers
    return {
        "projections": layers * (h * q + h * k + h * k + q * h),  # q, k, both values together, output
        "prologue": layers * (q + k) * (shape.conv_taps[0] + shape.kv_channels * shape.conv_taps[1]),
        "attention": attention_flops(shape, shape.seen_tokens(seq_length)),
        "router": layers * (h * r + 2 * r * r + r * (shape.num_experts + 1)),
        "experts": layers * 3 * h * shape.moe_ffn_hidden_size,
        "head": 2.0 * h * shape.vocab_size,
    }


def attention_flops(shape: Shape, keys: float) -> float:
    """Return operations of a token's products with `keys` keys and values, of all layers together."""
    return 2.0 * 2 * shape.query_channels * keys


def training_flops(shape: Shape, tokens: int, seq_length: int) -> float:
    """Return operations of forward and backward over `tokens` tokens in sequences of `seq_length`."""
    parts = forward_flops_by_part(shape, seq_length)
    if shape.lora_rank is None:
        return 3.0 * tokens * sum(parts.values())
    adapters = adapter_parameters(shape)
    trained = parts["attention"] + parts["prologue"] + ("router" in shape.lora_targets) * parts["router"]
    active = adapters["attention"] + adapters["experts"] / shape.expert_adapters
    return tokens * (2.0 * sum(parts.values()) + trained + 6.0 * active)


def adapter_parameters(shape: Shape) -> dict[str, int]:
    """Return the parameters that are trained with adapters, by target; zeros without adapters."""
    h, f, r, layers, targets = (
        shape.hidden_size,
        shape.moe_ffn_hidden_size,
        shape.router_hidden_size,
        shape.num_layers,
        shape.lora_targets if shape.lora_rank else (),
    )
    channels = {
        "attention": 5 * h + 2 * shape.query_channels + 2 * shape.key_channels,  # of both sides of five matrices
        "experts": shape.expert_adapters * (2 * h + 3 * f),
    }
    of_layer = {target: (shape.lora_rank or 0) * count for target, count in channels.items()}
    of_layer["router"] = (h + 1) * r + 2 * (r + 1) * r + (shape.num_experts + 1) * r
    return {target: layers * count * (target in targets) for target, count in of_layer.items()}


def active_parameters(shape: Shape) -> int:
    """Return the parameters that one token uses: one expert of each layer, and no embedding."""
    parts = count_parameters(shape)
    return sum(parts.values()) - parts["embedding"] - parts["experts"] + parts["experts"] // shape.num_experts


def cache_bytes(shape: Shape, element_bytes: int = 2) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    return 2 * shape.num_layers * shape.key_channels * element_bytes


def count_parameters(shape: Shape) -> dict[str, int]:
    """Return parameters by component; the tied head is the embedding. Their sum is the model's size."""
    h, r, layers = shape.hidden_size, shape.router_hidden_size, shape.num_layers
    q, k = shape.query_channels, shape.key_channels
    convolutions = (q + k) * (shape.conv_taps[0] + 1 + shape.kv_channels * shape.conv_taps[1] + 1)
    attention = h * q + 2 * h * k + q * h + convolutions + shape.num_query_groups
    router = (h * r + r) + r + 2 * (r * r + r) + (shape.num_experts + 1) * r
    return {
        "embedding": shape.vocab_size * h,
        "attention": layers * attention,
        "router": layers * router + (layers - 1) * r,  # the first layer has no state to scale
        "experts": layers * shape.num_experts * 3 * h * shape.moe_ffn_hidden_size,
        "norms": (2 * layers + 1) * shape.norm_vectors * h,
        "residual_scaling": (8 * layers + 2) * h,
    }


def muon_matrices(shape: Shape, split_gate_up: bool = True) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return the matrices that Muon orthogonalises: of one expert, and of a layer outside its experts.

    split_gate_up: whether gate and up are two matrices.
    """
    h, f, r = shape.hidden_size, shape.moe_ffn_hidden_size, shape.router_hidden_size
    q, k, halves = shape.query_channels, shape.key_channels, 2 if split_gate_up else 1
    of_an_expert = [(2 * f // halves, h)] * halves + [(h, f)]
    return of_an_expert, [
        (q, h),
        (k, h),
        (k // 2, h),
        (k // 2, h),
        (h, q),
        (r, h),
        (r, r),
        (r, r),
        (shape.num_experts + 1, r),
    ]
