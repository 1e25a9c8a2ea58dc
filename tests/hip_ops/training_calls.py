# SPDX-License-Identifier: Apache-2.0
"""Calls of the operators with the sizes and dtypes of training on one device: ZAYA1-base's, and ZAYA1-74B's on one of
eight expert-parallel ranks. Tensors are not initialised.
"""

import dataclasses
import math

import torch

from hip_ops.ops.linear_cross_entropy import passes
from hip_ops.ops.newton_schulz import plan
from hip_ops.ops.newton_schulz.plan import coefficient_triples
from hip_ops.runtime.model_sizes import ModelSizes
from hip_ops.saved_bytes import chunk_for, parts_of_exponentials, router_columns

BF16, FP32 = torch.bfloat16, torch.float32


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of experiment=zaya1_base; tests/hip_ops/test_checked_variants.py compares them with the recipe."""

    seq_length: int = 4096
    micro_batch_size: int = 8
    hidden_size: int = 2048
    moe_ffn_hidden_size: int = 2048
    num_experts: int = 16
    num_attention_heads: int = 8
    num_query_groups: int = 2
    kv_channels: int = 128
    rotary_percent: float = 0.5
    router_hidden_size: int = 256
    muon_coefficients: str = "simple"
    muon_steps: int = 5

    @property
    def matrices(self) -> dict[tuple[int, int], None]:
        """(rows, columns) of the matrices that Muon updates."""
        h, f, r = self.hidden_size, self.moe_ffn_hidden_size, self.router_hidden_size
        q, k = self.num_attention_heads * self.kv_channels, self.num_query_groups * self.kv_channels
        shapes = ((2 * f, h), (h, f), (h, q), (q, h), (k, h), (r, h), (k // 2, h), (r, r), (self.num_experts + 1, r))
        return dict.fromkeys(shapes)

    def of_a_rank(self, expert_ranks: int = 1) -> ModelSizes:
        """Return what the self-check is told."""
        shared = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(ModelSizes)
            if hasattr(self, field.name)
        }
        return ModelSizes(**shared | {"num_experts": self.num_experts // expert_ranks, "classes": self.num_experts + 1})


ZAYA1_74B = Sizes(
    micro_batch_size=1, hidden_size=4096, moe_ffn_hidden_size=4096, num_experts=24, num_attention_heads=16
)


def training_calls(
    statistics_parts: int, sizes: Sizes = Sizes(), device: str = "cpu", expert_ranks: int = 1
) -> dict[str, list[tuple]]:
    """Returns the arguments of all calls by operator. The experts' matrices and main gradients lie in buffers of
    2 GiB, since DDP's buffers of all layers are larger.

    expert_ranks: among which the experts are divided. Rows and tokens of a rank are as many as on one device.

    statistics_parts: parts of a row of logits, which depend on the device. Newton-Schulz is called with one matrix of
    a shape and with more of them, which take larger tiles, since a rank's share is any number of them. ZAYA1-base has
    no LayerNorm: its calls are those of model.normalization=LayerNorm.
    """
    s, b, hidden, width = sizes.seq_length, sizes.micro_batch_size, sizes.hidden_size, sizes.moe_ffn_hidden_size
    tokens, experts, classes = s * b, sizes.num_experts // expert_ranks, passes.CLASSES
    groups, heads, d, r = sizes.num_query_groups, sizes.num_attention_heads, sizes.kv_channels, sizes.router_hidden_size
    channels, values = (heads + groups) * d, groups * d
    chunk, parts = chunk_for(tokens, classes, 2), parts_of_exponentials(classes)

    def empty(*shape, dtype=BF16):
        return torch.empty(shape, dtype=dtype, device=device)

    def fp32(*shape):
        return empty(*shape, dtype=FP32)

    def zeros(count, dtype=torch.int32):
        return torch.zeros(count, dtype=dtype, device=device)

    def in_a_buffer(*shape, dtype=BF16):
        elements = math.prod(shape)
        return empty(max(2**31 // dtype.itemsize, elements), dtype=dtype)[:elements].view(shape)

    x, stream, rstd, vectors = empty(s, b, hidden), fp32(s, b, hidden), fp32(s, b, 1), [empty(hidden)] * 5
    prologue = (
        empty(s, b, channels + values), empty(channels, 1, 2), empty(channels), empty(channels, d, 2), empty(channels),
        empty(groups), fp32(s, 1, int(d * sizes.rotary_percent)), None, None, None,
    )  # fmt: skip
    query, key, norm = empty(s, b, heads, d), empty(s, b, groups, d), fp32(heads + groups, s, b)
    ids, maps = zeros(tokens, torch.int64), zeros(tokens)
    rows, probs, offsets = empty(tokens, hidden), fp32(tokens), zeros(experts)
    router_classes = sizes.num_experts + 1
    previous, first = (empty(tokens, r), empty(r)), (None, None)
    router = (empty(r), empty(r), empty(r, r), empty(r), empty(r, r), empty(r), empty(router_classes, r))
    routed = (empty(tokens, r), empty(tokens, r), empty(tokens, router_columns(router_classes)), ids)
    matrices = (router[1], router[2], router[4], router[6], 1e-5, sizes.num_experts, True)
    gate_up, fc1, fc2 = (
        empty(tokens, 2 * width),
        in_a_buffer(experts, 2 * width, hidden),
        in_a_buffer(experts, hidden, width),
    )
    main_fc1, main_fc2 = (in_a_buffer(*each.shape, dtype=FP32) for each in (fc1, fc2))
    unit = empty(tokens, width)
    logits, labels, of_chunk = empty(chunk, classes), ids[:chunk], fp32(chunk)
    one, shapes = fp32(1), [(1, router_classes, r), (3, hidden, hidden)]
    fp32s, masters, bf16s = ([empty(*shape, dtype=dtype) for shape in shapes] for dtype in (FP32, FP32, BF16))
    triples = coefficient_triples(sizes.muon_coefficients, sizes.muon_steps)

    def newton_schulz(batch, m, n):
        made = plan.make_plan(triples, m, n, torch.float16)
        flat = [value for triple in triples for value in triple]
        return empty(batch, m, n), fp32(batch), flat, made.form, made.restarts, torch.float16, 1e-7

    batches = [(count, *shape) for shape in sizes.matrices for count in (1, 4, 16)]
    return {
        "merge_norm": [(x, stream, *vectors, bias, 1e-5) for bias in (None, empty(hidden))],  # RMSNorm and LayerNorm
        "merge_norm_backward": [
            (x, upstream, x, stream, mean, rstd, *vectors, BF16)
            for mean in (None, rstd)
            for upstream in (stream, None)  # None: the last norm
        ],
        "cca_prologue": [(*prologue, groups, values // 2)],
        "cca_prologue_backward": [(query, key, key, *prologue, query, key, norm, groups, values // 2)],
        "router_mlp": [
            (empty(tokens, r), *before, *router, fp32(router_classes), None, 1e-5, sizes.num_experts)
            for before in (previous, first)
        ],
        "router_mlp_backward": [
            (probs, d_state, empty(tokens, r), *before, *routed, *matrices)
            for before, d_state in ((previous, routed[0]), (first, routed[0]), (previous, None))
        ],
        "sort_by_expert": [(ids, experts)],
        "gather_rows": [(rows, maps, maps, each) for each in (probs, None)],
        "weighted_swiglu": [(gate_up, probs, offsets)],
        "weighted_swiglu_backward": [(unit, gate_up, probs, offsets, True)],
        "grouped_rows": [
            (rows, fc1.mT, offsets),
            (unit, fc2.mT, offsets),
            (rows, fc2, offsets),
            (gate_up, fc1, offsets),
        ],
        "grouped_outer_": [
            (out, a, b, offsets, accumulate)
            for out, a, b in ((main_fc2, rows, unit), (main_fc1, gate_up, rows))
            for accumulate in (True, False)
        ],
        "newton_schulz": [newton_schulz(*batch) for batch in batches],
        "muon_momentum_": [
            (fp32s, masters, bf16s, sums, one, found_inf, 0.95, True)
            for sums in (fp32(2), None)
            for found_inf in (one, None)
        ],
        "muon_update_": [
            (bf16s, weights, params, [1.0, 1.0], 1e-3, None, 0.1, found_inf)
            for weights, params in ((masters, bf16s), ([], masters))
            for found_inf in (one, None)
        ],
        "row_statistics": [(logits, labels, 0, statistics_parts)],
        "overwrite_with_exponentials": [(logits, labels, 0, parts)],
        "finish_gradient": [(logits, labels, 0, fp32(parts, 3, chunk), 0, parts, of_chunk, 0.0)],
        "overwrite_with_gradient": [(logits, labels, 0, fp32(2, chunk), of_chunk, 0.0)],
        "add_rows_": [(fp32(classes, hidden), ids, rows)],
        # products that were rounded: pieces of the head's (main_grad.ROUNDED_ELEMENTS), a projection's, grouped_mm's
        "add_gradient_": [
            (fp32(*shape), empty(*shape)) for shape in ((2**25 // hidden, hidden), (channels + values, hidden))
        ]
        + [(main_fc1, fc1)],
    }
