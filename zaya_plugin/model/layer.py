# SPDX-License-Identifier: Apache-2.0
"""One ZAYA1 layer: CCGQA, scaled merge, mixture of experts, scaled merge, on an fp32 residual stream.

Megatron's transformer block passes a `context` tensor to every layer and takes one back, for cross-attention. Here
`context` carries the router state from layer to layer, also through activation recomputation. Between pipeline stages
the block passes one tensor only, so the state travels at the end of the stream's channels. `context_mask`, which the
block passes to every layer unchanged, may carry forced expert ids (`model(..., extra_block_kwargs={"context_mask":
ids})`).

After `link_layers` a layer also applies the next layer's input norm, in one pass over the stream with its own last
merge, and returns the result in `context` (`LinkedContext`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from megatron.core import tensor_parallel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import get_pg_rank, make_viewless_tensor
from torch import Tensor

from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.norm import ZayaRMSNorm
from zaya_plugin.model.residual import InputAffine, ResidualScaling
from zaya_plugin.model.small_gradients import read_together
from zaya_plugin.parallel.stage_boundary import join_stream_and_state, split_stream_and_state


@dataclass
class ZayaLayerSubmodules(TransformerLayerSubmodules):
    """Megatron's slots plus the merges and the affine on the embedding; only layer 1 builds the affine."""

    input_affine: type = InputAffine
    post_attention_residual: type = ResidualScaling
    post_mlp_residual: type = ResidualScaling


class LinkedContext(NamedTuple):
    """The `context` between linked layers.

    router_state: as in `ZayaTransformerLayer.forward`. stream: the tensor that is also returned as hidden_states.
    normed [s, b, h]: stream after the next layer's input norm.
    """

    router_state: Tensor | None
    stream: Tensor
    normed: Tensor


class ZayaTransformerLayer(TransformerLayer):
    """Layer for Megatron's TransformerBlock (transformers `ZayaDecoderLayer`)."""

    def __init__(
        self,
        config: ZayaConfig,
        submodules: ZayaLayerSubmodules,
        layer_number: int = 1,
        *args,
        vp_stage: int | None = None,
        **kwargs,
    ):
        super().__init__(config, submodules, layer_number, *args, vp_stage=vp_stage, **kwargs)
        first, last = self.layer_number == 1, self.layer_number == config.num_layers
        stages = config.pipeline_model_parallel_size > 1
        self.receives_state = stages and not first and layer_number == 1
        self.sends_state = (
            stages
            and not last
            and layer_number == get_num_layers_to_build(config, vp_stage, get_pg_rank(self.pg_collection.pp))
        )
        self.input_affine = submodules.input_affine(config) if first else None
        self.post_attention_residual = submodules.post_attention_residual(config)
        self.post_mlp_residual = submodules.post_mlp_residual(config)
        # The next layer's input norm, set by link_layers; in a tuple, so that it is not registered as a submodule of
        # this layer.
        self.next_norm: tuple[ZayaRMSNorm, ...] = ()
        assert isinstance(self.cross_attention, IdentityOp), "context carries the router state"

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        context: Tensor | LinkedContext | None = None,
        context_mask: Tensor | None = None,
        rotary_pos_emb: Tensor | None = None,
        attention_bias: Tensor | None = None,
        inference_context=None,
        packed_seq_params=None,
        **_,
    ) -> tuple[Tensor, Tensor | LinkedContext | None]:
        """Run the layer.

        Args: hidden_states, the stream [s, b, h] (the embedding in layer 1; stream and router state [s, b, h + r] in
        the first layer of a later pipeline stage); context, the previous layer's router state [s, b, r] or None, or its
        LinkedContext; context_mask, int64 [num_layers, s, b] expert ids that replace the router's choice where not
        negative, or None; rotary_pos_emb [s, 1, 1, r] radians. Returns: the new stream [s, b, h] and this layer's
        router state, as a LinkedContext if it is linked to the next one; in the last layer of a pipeline stage but the
        last one, both as one tensor [s, b, h + r], and None.
        """
        if self.receives_state:
            hidden_states, context = split_stream_and_state(
                hidden_states, self.config.hidden_size, self.config.params_dtype
            )
        state, normed = _received(context, hidden_states)
        discard, read = _keep, read_together(self._vectors())
        if normed is None:
            hidden_states, normed, discard = self._begin(hidden_states)
        output, _ = self.self_attention(
            normed,
            attention_mask=attention_mask,
            inference_context=inference_context,
            rotary_pos_emb=rotary_pos_emb,
            attention_bias=attention_bias,
            packed_seq_params=packed_seq_params,
            read=read,
        )
        discard(output)
        if self.recompute_pre_mlp_layernorm:
            hidden_states = self.post_attention_residual(output, hidden_states, read)
            normed, discard = _recomputed_norm(self.pre_mlp_layernorm, hidden_states)
        else:
            merge = self.post_attention_residual.merge_and_norm
            (hidden_states, normed), discard = merge(output, hidden_states, self.pre_mlp_layernorm, read), _keep
        forced = None if context_mask is None else context_mask[self.layer_number - 1]
        output, state = self.mlp(normed, router_state=state, forced_expert_ids=forced)
        discard(output)
        if self.next_norm:
            hidden_states, normed = self.post_mlp_residual.merge_and_norm(output, hidden_states, *self.next_norm, read)
            return hidden_states, LinkedContext(state, hidden_states, normed)
        hidden_states = self.post_mlp_residual(output, hidden_states, read)

        if self.sends_state:
            hidden_states, state = join_stream_and_state(hidden_states, state), None
        hidden_states = make_viewless_tensor(
            inp=hidden_states, requires_grad=hidden_states.requires_grad, keep_graph=True
        )
        return hidden_states, state

    def _vectors(self) -> tuple[Tensor, ...]:
        """Return the small parameters that only `forward` reads.

        The vectors of a norm that is recomputed by itself are left out, and so is the next layer's norm: that layer reads
        it if something has replaced the stream in between.
        """
        norms = () if self.recompute_pre_mlp_layernorm else self.pre_mlp_layernorm.vectors()
        return (
            *self.post_attention_residual.vectors(),
            *self.post_mlp_residual.vectors(),
            *norms,
            *self.self_attention.vectors(),
        )

    def _begin(self, hidden_states: Tensor):
        """Return the stream, its norm and the function to call on attention's result (see `_recomputed_norm`), where
        the layer before has not computed the norm.
        """
        affine, norm, recompute = self.input_affine, self.input_layernorm, self.recompute_input_layernorm
        if affine is not None and not recompute:
            return *affine.affine_and_norm(hidden_states, norm), _keep
        if affine is not None:
            hidden_states = affine(hidden_states)
        return hidden_states, *(_recomputed_norm(norm, hidden_states) if recompute else (norm(hidden_states), _keep))


def link_layers(layers: Sequence[ZayaTransformerLayer], config: ZayaConfig) -> None:
    """Let each of a stage's layers apply the next one's input norm with its own last merge. Parameter names do not
    change.

    A layer is not linked if the next norm is recomputed by itself, nor at the end of a unit of full recomputation: only
    plain tensors carry gradients across that border, and the normed stream would be kept beside the stream.
    """
    for index, (layer, following) in enumerate(pairwise(layers)):
        norm = following.input_layernorm
        if not following.recompute_input_layernorm and not _ends_recomputed_part(config, index):
            layer.next_norm = (norm,)


def _ends_recomputed_part(config: ZayaConfig, index: int) -> bool:
    """Return whether a unit of full recomputation ends behind layer `index` of the stage, counted from 0."""
    if config.recompute_granularity != "full":
        return False
    if config.recompute_method == "uniform":
        return (index + 1) % config.recompute_num_layers == 0
    return (
        index < config.recompute_num_layers
    )  # block: each of the first layers is a unit, the others are not recomputed


def _received(context: Tensor | LinkedContext | None, stream: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return the previous layer's router state, and the normed stream unless something has replaced the stream
    since.
    """
    if not isinstance(context, LinkedContext):
        return context, None
    assert context.normed.requires_grad or not stream.requires_grad, (
        "a LinkedContext crossed the border of a recomputed part"
    )
    return context.router_state, context.normed if context.stream is stream else None


def _keep(output: Tensor) -> None:
    """Do nothing; takes the place of a checkpoint's discard function where the normed tensor is kept."""


def _recomputed_norm(norm: ZayaRMSNorm, x: Tensor):
    """Return normed x, and the function to call on the result of the module that consumed it.

    That call frees the normed tensor, and the backward pass computes it again.
    """
    # None means no fp8; the default False would require Transformer Engine.
    checkpoint = tensor_parallel.CheckpointWithoutOutput(fp8=None)
    return checkpoint.checkpoint(norm, x), checkpoint.discard_output_and_register_recompute
