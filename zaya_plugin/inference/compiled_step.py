# SPDX-License-Identifier: Apache-2.0
"""A layer's decoding step that torch.compile turns into few kernels.

The layers of training launch every operator by itself, which for one row takes longer than the bytes that it reads. A
compiler cannot see into these operators, so `layer_step` is ZAYA's layer from their references (hip_ops/ops/*/
reference.py). All layers with a cache of one length share one compiled version.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

import hip_ops
from hip_ops.ops.cca_prologue.reference import cca_prologue
from hip_ops.ops.rms_norm.reference import merge_norm
from hip_ops.ops.router_mlp.reference import router_mlp
from hip_ops.ops.weighted_swiglu.reference import weighted_swiglu
from zaya_plugin.model.attention import key_scale, rope_table
from zaya_plugin.model.decode_state import DecodeState
from zaya_plugin.model.experts import as_block
from zaya_plugin.model.stream import LinkedContext

# Up to this many sequences each token reads its expert's matrices by itself; with more, several tokens share an expert,
# and the grouped products read it once.
MAX_SINGLE_TOKENS = 4
BLOCK = 128  # stored tokens that attention reads or leaves out together
# Matrices times one row become generated reductions, which read at the copy rate only with tuned blocks.
OPTIONS = {"coordinate_descent_tuning": True}


def layer_step(
    layer: nn.Module,
    norm: nn.Module,
    gamma: Tensor | None,
    projection: Tensor,
    matrices: list[Tensor],
    context: LinkedContext,
    rope: Tensor,
    state: DecodeState,
    blocks_read: tuple[Tensor, Tensor],
) -> LinkedContext:
    """Compute a layer for one token a sequence, as its `forward` does, add the token to `state` and return the context
    of the next layer.

    norm: the one that reads the layer's result. gamma: of the router, zeros in the first layer, whose previous state is
    zeros. projection: the attention's four, joined. matrices: fc1 [E, 2 f, h] and fc2 [E, h, f]. rope: `rope_table` of
    the tokens' positions. blocks_read: `block_places` of the layer's cache.
    """
    config, attention, router, stream, normed = layer.config, layer.self_attention, layer.mlp.router, *context[1:]
    projected, convolution = F.linear(normed, projection), attention.conv_qk_grouped
    z, _, delayed = attention.split_projected(projected)
    depthwise_weight, depthwise_bias, grouped_bias, temperature = attention.vectors()
    query, key, value, _ = cca_prologue(
        projected,
        depthwise_weight,
        depthwise_bias,
        convolution.weight,
        grouped_bias,
        key_scale(temperature, config.temperature_form),
        rope,
        state.z.unsqueeze(0),
        state.delayed.unsqueeze(0),
        None,
        config.num_query_groups,
        delayed.shape[-1],
    )
    state.keep(z, delayed, key, value)
    attended = attention_to(state, query, blocks_read, config.softmax_scale).unsqueeze(0)
    output = F.linear(attended, attention.linear_proj.weight)
    vectors, eps = layer.post_attention_residual.vectors(), config.layernorm_epsilon
    normed, stream, *_ = merge_norm(output, stream, *vectors, layer.pre_mlp_layernorm.weight, None, eps)

    tokens, skip = normed[0], config.num_moe_experts
    unweighted = skip if config.moe_skip_expert and config.skip_output == "zero" else -1
    router_state, weights, ids, *_ = router_mlp(
        F.linear(tokens, router.down_proj.weight),
        context.router_state,
        gamma,
        router.down_proj.bias,
        router.norm.weight,
        router.fc1.weight,
        router.fc1.bias,
        router.fc2.weight,
        router.fc2.bias,
        router.out_proj.weight,
        router.balancing_biases[: router.num_classes],
        None,
        router.norm.eps,
        unweighted,
    )
    output = experts(tokens, weights, ids, *matrices)
    if layer.mlp.identity_skip:
        output = torch.where((ids == skip).unsqueeze(-1), tokens * weights.unsqueeze(-1), output).to(output.dtype)
    vectors, output = layer.post_mlp_residual.vectors(), output.unsqueeze(0)
    normed, stream, *_ = merge_norm(output, stream, *vectors, norm.weight, None, eps)
    return LinkedContext(router_state, stream, normed)


def block_places(positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return how many blocks of a cache of `length` tokens each sequence's attention reads, int32 [b, 1, 1], and the
    blocks in their order, int32 [b, 1, 1, n]. positions int64 [b].
    """
    order = torch.arange(-(-length // BLOCK), dtype=torch.int32, device=positions.device)
    counts = positions.clamp_max(length - 1).int().view(-1, 1, 1) // BLOCK + 1
    return counts, order.expand(len(positions), 1, 1, -1).contiguous()


def attention_to(state: DecodeState, query: Tensor, blocks_read: tuple[Tensor, Tensor], scale: float) -> Tensor:
    """Compute attention of one token a sequence to the stored ones, query [1, b, n, d] -> [b, n * d], by a kernel that
    reads a group's keys and values once, by many programs a sequence, and only the blocks up to the position.
    """
    positions = state.progress.positions
    mask = BlockMask.from_kv_blocks(
        *blocks_read,
        BLOCK_SIZE=BLOCK,
        mask_mod=lambda row, head, query, place: place <= positions[row],
        seq_lengths=(1, state.keys.shape[2]),
        compute_q_blocks=False,
    )
    heads = query.permute(1, 2, 0, 3), state.keys, state.values
    return flex_attention(*heads, None, mask, scale, enable_gqa=True).flatten(1)


def experts(tokens: Tensor, weights: Tensor, ids: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    """Compute W2_e (swiglu(W1_e x) * weight) of each token's class e: tokens [b, h], weights and ids [b], fc1 [E, 2 f,
    h], fc2 [E, h, f] -> [b, h]. A token of the class E, which has no matrices, gets 0 or the result of another expert.
    """
    if len(tokens) > MAX_SINGLE_TOKENS:
        order = hip_ops.sort_by_expert(ids, len(fc1))
        rows, row_weights = hip_ops.permute_to_experts(tokens, order, weights)
        gate_up = hip_ops.grouped_rows(rows, fc1.transpose(1, 2), order.offsets)
        hidden = hip_ops.weighted_swiglu(gate_up, row_weights, order.offsets)
        return hip_ops.unpermute_from_experts(hip_ops.grouped_rows(hidden, fc2.transpose(1, 2), order.offsets), order)
    # Elementwise, so that the compiler reads the chosen matrices within the sum and makes no copy of them.
    places, wide = ids.clamp_max(len(fc1) - 1), hip_ops.wide(tokens.dtype)
    gate_up = (fc1[places].to(wide) * tokens.to(wide).unsqueeze(1)).sum(-1).to(tokens.dtype)
    hidden = weighted_swiglu(gate_up, weights, None)
    return (fc2[places].to(wide) * hidden.to(wide).unsqueeze(1)).sum(-1).to(tokens.dtype)


# By the sizes of a batch and its caches, because torch keeps eight versions of a formula at most.
compiled = functools.cache(lambda batch, length: hip_ops.formula(layer_step, options=OPTIONS))


class CompiledLayer:
    """A layer as the Decoder calls it for one token a sequence. norm: the one that reads its result; the layer has no
    adapters and RMSNorms, and all heads and experts are on this rank. It keeps a copy of the projections: weights that change later
    need a new one.
    """

    def __init__(self, layer: nn.Module, norm: nn.Module):
        attention, router, experts = layer.self_attention, layer.mlp.router, layer.mlp.experts
        inputs = (attention.linear_q, attention.linear_k, attention.linear_v_current, attention.linear_v_delayed)
        projection = torch.cat([module.weight for module in inputs]).detach()
        gamma = torch.zeros_like(router.norm.weight) if layer.layer_number == 1 else router.router_states_scale
        matrices = [as_block(module.matrices()) for module in (experts.linear_fc1, experts.linear_fc2)]
        self.layer, self.own = layer, (norm, gamma if gamma is None else gamma.detach(), projection, matrices)

    def __call__(
        self, hidden_states: Tensor, context: LinkedContext | None, rotary_pos_emb: Tensor, inference_context, **_
    ) -> tuple[Tensor, LinkedContext]:
        """As the layer's `forward`."""
        layer, state = self.layer, inference_context
        if context is None:
            normed, stream = layer.input_affine.affine_and_norm(hidden_states, layer.input_layernorm)
            context = LinkedContext(normed.new_zeros(normed.shape[1], layer.config.router_hidden_size), stream, normed)
        rope, (batch, _, length, _) = rope_table(rotary_pos_emb, layer.self_attention.own_rotary_base), state.keys.shape
        context = compiled(batch, length)(layer, *self.own, context, rope, state, state.progress.blocks[length])
        return context.stream, context
