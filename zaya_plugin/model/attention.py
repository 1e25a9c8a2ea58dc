# SPDX-License-Identifier: Apache-2.0
"""CCGQA: grouped-query attention in a compressed latent space with convolutions over time (arXiv 2510.04476).

The arithmetic between projections and softmax is in `cca`; this module holds the parameters and speaks Megatron's
self-attention interface. Only causal training on whole sequences: no packing, no decoding state.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn

from zaya_plugin.model.cca import mix_qk, shift_values
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.initialization import constant_parameter, random_parameter


@dataclass
class ZayaAttentionSubmodules:
    """`linear` serves the four input projections; all three are ModuleSpecs or classes with Megatron's signatures."""

    linear: ModuleSpec | type
    core_attention: ModuleSpec | type
    linear_proj: ModuleSpec | type


class CausalConv(nn.Module):
    """Parameters of a two-tap convolution over time: weight [C, in, 2], bias [C], as torch.nn.Conv1d stores them."""

    def __init__(self, config: ZayaConfig, channels: int, channels_in: int):
        super().__init__()
        self.weight = random_parameter(config, (channels, channels_in, 2), config.init_method)
        self.bias = constant_parameter(config, (channels,), 0.0)


class ZayaSelfAttention(MegatronModule):
    """CCGQA self-attention with separate query, key, current-value and delayed-value projections.

    Parameters, d = kv_channels, n = num_attention_heads, g = num_query_groups, C = (n + g) d: linear_q [nd, h],
    linear_k [gd, h], linear_v_current and linear_v_delayed [gd/2, h], conv_qk_depthwise [C, 1, 2], conv_qk_grouped
    [C, d, 2], temperature [g], linear_proj [h, nd].
    """

    def __init__(
        self, config: ZayaConfig, submodules: ZayaAttentionSubmodules, layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal, cp_comm_type: str | None = None, pg_collection=None,
        name: str | None = None,
    ):
        super().__init__(config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        self.tp_group = pg_collection.tp
        self.attn_mask_type = attn_mask_type
        self.query_groups, self.head_dim = config.num_query_groups, config.kv_channels
        query_size, key_size = config.num_attention_heads * self.head_dim, self.query_groups * self.head_dim
        channels = query_size + key_size

        def input_projection(output_size: int, buffer: str) -> nn.Module:
            return build_module(
                submodules.linear, config.hidden_size, output_size, config=config, init_method=config.init_method,
                gather_output=False, bias=False, skip_bias_add=False, is_expert=False, tp_comm_buffer_name=buffer,
                tp_group=self.tp_group,
            )

        self.linear_q = input_projection(query_size, "qkv")
        self.linear_k = input_projection(key_size, "qkv")
        self.linear_v_current = input_projection(key_size // 2, "qkv")
        self.linear_v_delayed = input_projection(key_size // 2, "qkv")
        self.conv_qk_depthwise = CausalConv(config, channels, 1)
        self.conv_qk_grouped = CausalConv(config, channels, self.head_dim)
        self.temperature = constant_parameter(config, (self.query_groups,), config.temperature_init)
        self.core_attention = build_module(
            submodules.core_attention, config=config, layer_number=layer_number, attn_mask_type=attn_mask_type,
            attention_type="self", cp_comm_type=cp_comm_type, softmax_scale=config.softmax_scale,
            pg_collection=pg_collection,
        )
        self.linear_proj = build_module(
            submodules.linear_proj, query_size, config.hidden_size, config=config,
            init_method=config.output_init_method, bias=False, input_is_parallel=True, skip_bias_add=False,
            is_expert=False, tp_comm_buffer_name="proj", tp_group=self.tp_group,
        )
        self.recompute_core = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The four projections: z [s, b, C], current and delayed values [s, b, gd/2].

        The one place that reads the four matrices. Where they are plain matrices they are applied as one product: joining
        them costs a copy of 6 MB, and saves three reads of the input and three sums of its gradient.
        """
        linears = (self.linear_q, self.linear_k, self.linear_v_current, self.linear_v_delayed)
        if all(type(linear) is ColumnParallelLinear for linear in linears) and self.tp_group.size() == 1:
            sizes = [linear.weight.shape[0] for linear in linears]
            projected = F.linear(hidden_states, torch.cat([linear.weight for linear in linears]))
            return projected.split((sizes[0] + sizes[1], sizes[2], sizes[3]), dim=-1)
        query, key = self.linear_q(hidden_states)[0], self.linear_k(hidden_states)[0]
        z = torch.cat((query, key), dim=-1)
        return z, self.linear_v_current(hidden_states)[0], self.linear_v_delayed(hidden_states)[0]

    def forward(
        self, hidden_states: Tensor, attention_mask: Tensor | None = None, key_value_states: Tensor | None = None,
        inference_context=None, rotary_pos_emb: Tensor | None = None, rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None, rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None, packed_seq_params=None, sequence_len_offset: int | None = None, **_,
    ) -> tuple[Tensor, None]:
        """hidden_states [s, b, h] normed, rotary_pos_emb [s, 1, 1, r] radians -> (output [s, b, h], None).

        The mask is causal; attention_mask is handed on to core attentions that want it. Raises ValueError for packed
        sequences and for decoding.
        """
        if packed_seq_params is not None:
            raise ValueError("packed_seq_params: the convolutions would mix documents; train on whole sequences")
        if inference_context is not None:
            raise ValueError("inference_context: the model keeps no decoding state; export it to transformers")
        assert key_value_states is None and attention_bias is None
        if rotary_pos_emb is not None:
            # Megatron computes the angles on the GPU, if there is one, also for a model on the CPU.
            rotary_pos_emb = rotary_pos_emb.to(hidden_states.device)
        z, value_current, value_delayed = self.project(hidden_states)
        query, key = mix_qk(
            z, self.conv_qk_depthwise.weight, self.conv_qk_depthwise.bias, self.conv_qk_grouped.weight,
            self.conv_qk_grouped.bias, self.temperature, rotary_pos_emb, query_groups=self.query_groups,
            head_dim=self.head_dim, temperature_form=self.config.temperature_form,
            in_fp32=self.config.qk_norm_in_fp32,
        )
        value = shift_values(value_current, value_delayed, self.query_groups)
        if self.recompute_core and self.training:
            context = tensor_parallel.checkpoint(self._attend, False, query, key, value, attention_mask)
        else:
            context = self._attend(query, key, value, attention_mask)
        if type(self.linear_proj) is RowParallelLinear and self.tp_group.size() == 1:
            return F.linear(context, self.linear_proj.weight), None  # the same, without the wrapper's host time
        return self.linear_proj(context)[0], None

    def _attend(self, query, key, value, attention_mask):
        return self.core_attention(query, key, value, attention_mask, attn_mask_type=self.attn_mask_type)
