# SPDX-License-Identifier: Apache-2.0
"""One ZAYA1 layer on an fp32 residual stream: norm, CCGQA, scaled merge, norm, mixture of experts, scaled merge.

`Stream` (stream.py) computes norms and merges and passes stream and router state between layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from megatron.core.utils import get_pg_rank
from torch import Tensor

from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.residual import InputAffine, ResidualScaling, ZayaRMSNorm
from zaya_plugin.model.stream import LinkedContext, Stream


@dataclass
class ZayaLayerSubmodules(TransformerLayerSubmodules):
    """Megatron's slots plus the merges and the affine on the embedding; only layer 1 builds the affine."""

    input_affine: type = InputAffine
    post_attention_residual: type = ResidualScaling
    post_mlp_residual: type = ResidualScaling


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
        self.input_layernorm.recompute = self.recompute_input_layernorm
        self.pre_mlp_layernorm.recompute = self.recompute_pre_mlp_layernorm
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
        negative, or None, as in `model(..., extra_block_kwargs={"context_mask": ids})`; rotary_pos_emb [s, 1, 1, r]
        radians. Returns: the new stream [s, b, h] and this layer's router state, as a LinkedContext if it is linked to
        the next one; in the last layer of a pipeline stage but the last one, both as one tensor [s, b, h + r], and
        None.
        """
        stream, router_state = Stream.receive(self, hidden_states, context)
        if self.input_affine is not None:
            stream.start(self.input_affine, self.input_layernorm)

        normed = stream.norm(self.input_layernorm)
        output, _ = self.self_attention(
            normed,
            attention_mask=attention_mask,
            inference_context=inference_context,
            rotary_pos_emb=rotary_pos_emb,
            attention_bias=attention_bias,
            packed_seq_params=packed_seq_params,
            view=stream.view,
        )
        stream.merge(output, self.post_attention_residual, self.pre_mlp_layernorm)

        normed = stream.norm(self.pre_mlp_layernorm)
        forced = None if context_mask is None else context_mask[self.layer_number - 1]
        output, router_state = self.mlp(normed, router_state=router_state, forced_expert_ids=forced)
        stream.merge(output, self.post_mlp_residual, *self.next_norm)
        return stream.send(router_state)

    def vectors(self) -> tuple[Tensor, ...]:
        """Return the small parameters that only `forward` reads.

        The vectors of a norm that is recomputed by itself are left out, and so is the next layer's norm: that layer
        reads it if something has replaced the stream in between.
        """
        norms = () if self.pre_mlp_layernorm.recompute else self.pre_mlp_layernorm.vectors()
        return (
            *self.post_attention_residual.vectors(),
            *self.post_mlp_residual.vectors(),
            *norms,
            *self.self_attention.vectors(),
        )
