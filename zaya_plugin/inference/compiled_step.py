# SPDX-License-Identifier: Apache-2.0
"""A decoding step of one token a sequence whose layers are compiled by torch.compile, in fewer and larger kernels.

The layers of training launch every operator by itself, which for one row takes longer than the bytes that it reads. A
compiler cannot see into these operators, so `layer_step` is ZAYA's layer from their references (hip_ops/ops/*/
reference.py). It is a function of tensors, so that all layers with a cache of one length share one compiled version.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils._pytree import tree_map

import hip_ops
from hip_ops.ops.cca_prologue.reference import cca_prologue
from hip_ops.ops.rms_norm.reference import merge_norm
from hip_ops.ops.router_mlp import RouterParameters
from hip_ops.ops.router_mlp.reference import router_mlp
from hip_ops.ops.weighted_swiglu.reference import weighted_swiglu
from hip_ops.runtime.compiled import compile_function, is_of_the_compiler
from zaya_plugin.model.attention import key_scale, rope_table
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.decode_state import DecodeState
from zaya_plugin.model.experts import as_block
from zaya_plugin.model.gpt_model import embedded

logger = logging.getLogger(__name__)
# Up to this many sequences each token reads its expert's matrices by itself; with more, several tokens share an expert,
# and the grouped products read it once.
MAX_SINGLE_TOKENS = 4
KEY_BLOCK = 128  # stored tokens that attention reads or leaves out together
# Matrices times one row become generated reductions, which read at the copy rate only with tuned blocks.
OPTIONS = {"coordinate_descent_tuning": True}


class LayerTensors(NamedTuple):
    """Parameters of a layer, and of the norm behind it. projections: queries, keys, current and delayed values. merges
    and norms: the vectors of both, in the order of hip_ops' `merge_norm`. fc1 [E, 2 f, h], fc2 [E, h, f].
    """

    projections: tuple[Tensor, ...]
    convolutions: tuple[Tensor, ...]
    temperature: Tensor
    output: Tensor
    merges: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    norms: tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
    down: Tensor
    router: RouterParameters
    fc1: Tensor
    fc2: Tensor

    @classmethod
    def of(cls, layer, norm) -> LayerTensors:
        """layer: a ZayaTransformerLayer; norm: the one that reads its result."""
        attention, router, experts = layer.self_attention, layer.mlp.router, layer.mlp.experts
        inputs = (attention.linear_q, attention.linear_k, attention.linear_v_current, attention.linear_v_delayed)
        depthwise, grouped = attention.conv_qk_depthwise, attention.conv_qk_grouped
        gamma = router.router_states_scale
        tensors = cls(
            tuple(module.weight for module in inputs),
            (depthwise.weight, depthwise.bias, grouped.weight, grouped.bias),
            attention.temperature,
            attention.linear_proj.weight,
            (layer.post_attention_residual.vectors(), layer.post_mlp_residual.vectors()),
            (layer.pre_mlp_layernorm.vectors(), norm.vectors()),
            router.down_proj.weight,
            RouterParameters(
                gamma=torch.zeros_like(router.norm.weight) if gamma is None else gamma,  # as if the layers were alike
                b_down=router.down_proj.bias,
                w_norm=router.norm.weight,
                w1=router.fc1.weight,
                b1=router.fc1.bias,
                w2=router.fc2.weight,
                b2=router.fc2.bias,
                w_out=router.out_proj.weight,
                biases=router.balancing_biases[: router.num_classes],
            ),
            as_block(experts.linear_fc1.matrices()),
            as_block(experts.linear_fc2.matrices()),
        )
        return tree_map(Tensor.detach, tensors)  # a parameter and a tensor would need two compiled versions


def layer_step(
    stream: Tensor,
    normed: Tensor,
    router_state: Tensor,
    tensors: LayerTensors,
    state: DecodeState,
    rope: Tensor,
    visible: BlockMask,
    config: ZayaConfig,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute a layer for one token a sequence, as ZayaTransformerLayer does, and add the token to `state`.

    stream and normed [1, b, h]: before the layer; router_state [b, r]: of the previous layer, zeros in the first. rope:
    `rope_table` of the tokens' positions. visible: places of the layer's cache to attend to. Returns the three for the
    next layer.
    """
    h, batch, eps = config.hidden_size, stream.shape[1], config.layernorm_epsilon
    queries, keys, *values = (F.linear(normed, weight) for weight in tensors.projections)
    z = torch.cat((queries, keys), dim=-1)
    query, key, value, _ = cca_prologue(
        torch.cat((z, *values), dim=-1),
        *tensors.convolutions,
        key_scale(tensors.temperature, config.temperature_form),
        rope,
        state.z.unsqueeze(0),
        state.delayed.unsqueeze(0),
        None,
        config.num_query_groups,
        values[1].shape[-1],
    )
    state.keep(z, values[1], key, value)
    context = flex_attention(
        query.permute(1, 2, 0, 3), state.keys, state.values, None, visible, config.softmax_scale, enable_gqa=True
    )
    output = F.linear(context.reshape(1, batch, -1), tensors.output)
    (merge, after), ((weight, *bias), (next_weight, *next_bias)) = tensors.merges, tensors.norms
    normed, stream, *_ = merge_norm(output, stream, *merge, weight, *(bias or [None]), eps)

    skip = config.num_moe_experts
    unweighted = skip if config.moe_skip_expert and config.skip_output == "zero" else -1
    projected, tokens = F.linear(normed, tensors.down)[0], normed.view(batch, h)
    router_state, weights, ids, *_ = router_mlp(
        projected, router_state, *tensors.router, None, config.router_norm_epsilon, unweighted
    )
    output = experts(tokens, weights, ids, tensors.fc1, tensors.fc2)
    if config.moe_skip_expert and unweighted < 0:
        output = torch.where((ids == skip).unsqueeze(-1), tokens * weights.unsqueeze(-1), output).to(output.dtype)
    normed, stream, *_ = merge_norm(output.unsqueeze(0), stream, *after, next_weight, *(next_bias or [None]), eps)
    return stream, normed, router_state


def experts(tokens: Tensor, weights: Tensor, ids: Tensor, fc1: Tensor, fc2: Tensor) -> Tensor:
    """Compute W2_e (swiglu(W1_e x) * weight) of each token's class e: tokens [b, h], weights and ids [b], fc1 [E, 2 f,
    h], fc2 [E, h, f] -> [b, h]. Of the class E, which has no matrices, the result is finite or zero and not used unless
    its weight is 0.
    """
    if len(tokens) > MAX_SINGLE_TOKENS:
        order = hip_ops.sort_by_expert(ids, len(fc1))
        rows, row_weights = hip_ops.permute_to_experts(tokens, order, weights)
        gate_up = hip_ops.grouped_rows(rows, fc1.transpose(1, 2), order.offsets)
        hidden = hip_ops.weighted_swiglu(gate_up, row_weights, order.offsets)
        return hip_ops.unpermute_from_experts(hip_ops.grouped_rows(hidden, fc2.transpose(1, 2), order.offsets), order)
    places = ids.clamp_max(len(fc1) - 1)

    def product(block: Tensor, rows: Tensor) -> Tensor:
        # Elementwise, so that the compiler reads the chosen matrices within the sum and makes no copy of them.
        wide = hip_ops.wide(rows.dtype)
        return (block[places].to(wide) * rows.to(wide).unsqueeze(1)).sum(-1).to(rows.dtype)

    return product(fc2, weighted_swiglu(product(fc1, tokens), weights, None))


@functools.cache
def compiled_layer(batch: int, length: int, backend: str) -> Callable:
    """Return `layer_step` compiled for `batch` sequences and caches of `length` tokens, of all layers and models."""
    return compile_function(
        layer_step, fullgraph=True, backend=backend, options=OPTIONS if backend == "inductor" else None
    )


class CompiledStep:
    """Normed hidden states of one token of each of b sequences, by `layer_step`. Where the compiler fails, `failed`
    becomes true, with a warning, and the rest of the step runs uncompiled.

    Args: model: one that `compiles` accepts. states: one a layer, with a common Progress. backend: of torch.compile.
    """

    def __init__(self, model, states: list[DecodeState], backend: str = "inductor"):
        self.model, self.states, self.backend = model, states, backend
        self.positions, self.failed = states[0].progress.positions, False
        layers, config = model.decoder.layers, model.config
        norms = [*(layer.input_layernorm for layer in layers[1:]), model.decoder.final_layernorm]
        self.tensors = [LayerTensors.of(layer, norm) for layer, norm in zip(layers, norms, strict=True)]
        shape = len(self.positions), config.router_hidden_size
        self.no_state = torch.zeros(shape, dtype=config.params_dtype, device=self.positions.device)
        self.visible = {length: self._mask(length) for length in {state.keys.shape[2] for state in states}}

    @staticmethod
    def compiles(config: ZayaConfig) -> bool:
        """Return whether `layer_step` is the whole layer: it has no adapters, and one rank holds all heads and
        experts.
        """
        ranks = config.tensor_model_parallel_size * config.expert_model_parallel_size
        return ranks == 1 and config.lora_rank is None

    def run(self, tokens: Tensor) -> Tensor:
        """tokens int64 [b, 1] at the states' positions -> normed hidden states [1, b, h]."""
        model, config = self.model, self.model.config
        for length, mask in self.visible.items():
            mask.kv_num_blocks.copy_((self.positions.clamp_max(length - 1) // KEY_BLOCK + 1).view(-1, 1, 1))
        angles = model.rotary_pos_emb.of_positions(self.positions.unsqueeze(0))
        first, router_state = model.decoder.layers[0], self.no_state
        embedding = embedded(model.embedding, tokens, marks_main_grad=False)
        normed, stream = first.input_affine.affine_and_norm(embedding, first.input_layernorm)
        for layer, tensors, state in zip(model.decoder.layers, self.tensors, self.states, strict=True):
            rope, length = rope_table(angles, layer.self_attention.own_rotary_base), state.keys.shape[2]
            arguments = stream, normed, router_state, tensors, state, rope, self.visible[length], config
            stream, normed, router_state = self._layer(length, arguments)
        return normed

    def _layer(self, length: int, arguments: tuple) -> tuple[Tensor, Tensor, Tensor]:
        if not self.failed:
            try:
                return compiled_layer(len(self.positions), length, self.backend)(*arguments)
            except Exception as error:
                if not is_of_the_compiler(error):
                    raise
                self.failed = True
                reason = " ".join(str(error).splitlines()[:2])
                logger.warning("decoding: torch.compile failed, so each operator launches its kernels: %s", reason)
        return layer_step(*arguments)

    def _mask(self, length: int) -> BlockMask:
        """Return the mask of caches [b, g, length, d]: the places up to each sequence's position. A step reads the
        blocks that `run` counts, whatever the length.
        """
        batch, blocks, positions = len(self.positions), -(-length // KEY_BLOCK), self.positions
        indices = torch.arange(blocks, dtype=torch.int32, device=positions.device).expand(batch, 1, 1, -1).contiguous()
        counts = torch.ones(batch, 1, 1, dtype=torch.int32, device=positions.device)

        def up_to_position(row, head, query, place):
            return place <= positions[row]

        sizes = dict(BLOCK_SIZE=KEY_BLOCK, seq_lengths=(1, length), compute_q_blocks=False)
        return BlockMask.from_kv_blocks(counts, indices, mask_mod=up_to_position, **sizes)
