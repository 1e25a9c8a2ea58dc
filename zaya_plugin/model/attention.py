# SPDX-License-Identifier: Apache-2.0
"""CCGQA: grouped-query attention in a compressed latent space with convolutions over time (arXiv 2510.04476).

The arithmetic between projections and softmax is `hip_ops.cca_prologue`; this module holds the parameters and
implements Megatron's self-attention interface, also on context-parallel ranks and with packed documents. In decoding it
gets a DecodeState as Megatron's `inference_context`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

import hip_ops
from hip_ops.runtime.main_grad import main_grad_linear
from zaya_plugin.ground.errors import mistake
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.decode_state import DecodeState
from zaya_plugin.model.low_rank import adapters, low_rank_linear
from zaya_plugin.model.parameters import ParameterView, constant_parameter, direct, gathered, random_parameter
from zaya_plugin.parallel.context_exchange import BoundaryExchange, last_rows
from zaya_plugin.parallel.context_order import ContextShard
from zaya_plugin.parallel.packed_documents import PackedDocuments


@dataclass
class ZayaAttentionSubmodules:
    """`linear` serves queries and keys; all three are ModuleSpecs or classes with Megatron's signatures."""

    linear: ModuleSpec | type
    core_attention: ModuleSpec | type
    linear_proj: ModuleSpec | type


class CausalConv(nn.Module):
    """Parameters of a two-tap convolution over time: weight [C, in, 2], bias [C], as torch.nn.Conv1d stores them."""

    def __init__(self, config: ZayaConfig, channels: int, channels_in: int):
        super().__init__()
        self.weight = random_parameter(config, (channels, channels_in, 2), config.init_method)
        self.bias = constant_parameter(config, (channels,), 0.0)


class ValueProjection(nn.Module):
    """Weight [gd/2, h] of one of the two value projections, whole on every rank; `project` applies it.

    Not split over tensor-parallel ranks: with two key-value heads one rank uses all of it and the other rank none.
    """

    def __init__(self, config: ZayaConfig, output_size: int):
        super().__init__()
        self.weight = random_parameter(config, (output_size, config.hidden_size), config.init_method)


class ZayaSelfAttention(MegatronModule):
    """CCGQA self-attention with separate query, key, current-value and delayed-value projections.

    Parameters, d = kv_channels, n = num_attention_heads, g = num_query_groups, C = (n + g) d: linear_q [nd, h],
    linear_k [gd, h], linear_v_current and linear_v_delayed [gd/2, h], conv_qk_depthwise [C, 1, 2], conv_qk_grouped
    [C, d, 2], temperature [g], linear_proj [h, nd].

    Under tensor parallelism linear_q, linear_k and linear_proj hold this rank's heads (LocalHeads). The other
    parameters are whole on every rank; each rank uses its heads' part, so that the gradients add up over the ranks.
    """

    def __init__(
        self,
        config: ZayaConfig,
        submodules: ZayaAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection=None,
        name: str | None = None,
    ):
        super().__init__(config)
        pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.tp_group = pg_collection.tp
        self.context_group = pg_collection.cp
        self.shard = ContextShard.of(self.context_group, config.context_parallel_order)
        self.attn_mask_type = attn_mask_type
        self.own_rotary_base = None if config.window_of(layer_number) is None else config.swa_rotary_base
        self.head_dim, ranks = config.kv_channels, self.tp_group.size()
        self.query_groups = config.num_query_groups // ranks  # of this rank
        self.local = LocalHeads(
            self.tp_group.rank(), ranks, config.num_attention_heads, config.num_query_groups, self.head_dim
        )
        self.delayed_channels = self.local.delayed_channels
        query_size, key_size = config.num_attention_heads * self.head_dim, config.num_query_groups * self.head_dim
        channels = query_size + key_size

        def input_projection(output_size: int, buffer: str) -> nn.Module:
            return build_module(
                submodules.linear,
                config.hidden_size,
                output_size,
                config=config,
                init_method=config.init_method,
                gather_output=False,
                bias=False,
                skip_bias_add=False,
                is_expert=False,
                tp_comm_buffer_name=buffer,
                tp_group=self.tp_group,
            )

        self.linear_q = input_projection(query_size, "qkv")
        self.linear_k = input_projection(key_size, "qkv")
        self.linear_v_current = ValueProjection(config, key_size // 2)
        self.linear_v_delayed = ValueProjection(config, key_size // 2)
        self.conv_qk_depthwise = CausalConv(config, channels, 1)
        self.conv_qk_grouped = CausalConv(config, channels, self.head_dim)
        self.temperature = constant_parameter(config, (config.num_query_groups,), config.temperature_init)
        self.core_attention = build_module(
            submodules.core_attention,
            config=config,
            layer_number=layer_number,
            attn_mask_type=attn_mask_type,
            attention_type="self",
            cp_comm_type=cp_comm_type,
            softmax_scale=config.softmax_scale,
            pg_collection=pg_collection,
        )
        self.linear_proj = build_module(
            submodules.linear_proj,
            query_size,
            config.hidden_size,
            config=config,
            init_method=config.output_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="proj",
            tp_group=self.tp_group,
        )
        h, values = config.hidden_size, (key_size // 2, config.hidden_size)
        sizes = {"linear_q": (query_size, h), "linear_k": (key_size, h), "linear_v_current": values}
        sizes |= {"linear_v_delayed": values, "linear_proj": (h, query_size)}
        self.adapters = adapters(config, "attention", sizes)
        self.recompute_core = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def project(self, hidden_states: Tensor) -> Tensor:
        """Apply the four projections, and their adapters if there are any, for this rank's heads, to the whole sequence
        also under sequence parallelism.

        hidden_states [s / t, b, h] -> queries and keys [s, b, C / t], current and delayed values behind them, together
        gd / t channels (arXiv 2510.04476; without tensor parallelism t is 1 and each is gd / 2 wide). `split_projected`
        cuts it.
        """
        projected = self._project_by_weights(hidden_states)
        if self.adapters is None:
            return projected
        *inputs, _ = self.adapters.values()
        return projected + low_rank_linear(self.config, hidden_states, inputs)

    def _project_by_weights(self, hidden_states: Tensor) -> Tensor:
        """Return `project` without adapters.

        No other function reads the four matrices. Plain matrices are applied as one product: joining them costs a copy
        of 6 MB and saves three reads of the input, three gathers of the sequence and three sums of its gradient.
        """
        values = gathered(self.linear_v_current).weight, gathered(self.linear_v_delayed).weight
        plain = isinstance(self.linear_q, ColumnParallelLinear)
        if plain and self.local.ranks == 1:
            return main_grad_linear(
                hidden_states, gathered(self.linear_q).weight, gathered(self.linear_k).weight, *values
            )
        own_values = self.local.of_values(*values)
        if plain:
            matrices = (gathered(self.linear_q).weight, gathered(self.linear_k).weight, *own_values)
            return F.linear(self._whole_sequence(hidden_states), torch.cat(matrices))
        query, key = self.linear_q(hidden_states)[0], self.linear_k(hidden_states)[0]
        if self.local.ranks == 1:
            value = main_grad_linear(hidden_states, *values)
        else:
            value = F.linear(self._whole_sequence(hidden_states), torch.cat(own_values))
        return torch.cat((query, key, value), dim=-1)

    def split_projected(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return z [s, b, C / t], current and delayed values [s, b, *]."""
        values = self.query_groups * self.head_dim
        return projected.split(
            (projected.shape[-1] - values, values - self.delayed_channels, self.delayed_channels), dim=-1
        )

    def _whole_sequence(self, hidden_states: Tensor) -> Tensor:
        """Gather all tensor-parallel ranks' rows. Each rank's gradient is that of its heads; the backward pass sums
        over the ranks.
        """
        if self.local.ranks == 1:
            return hidden_states
        return gather_from_sequence_parallel_region(hidden_states, group=self.tp_group)

    def vectors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the small parameters: all but the matrices and the grouped convolution's weight."""
        return self.conv_qk_depthwise.weight, self.conv_qk_depthwise.bias, self.conv_qk_grouped.bias, self.temperature

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        inference_context=None,
        rotary_pos_emb: Tensor | None = None,
        rotary_pos_cos: Tensor | None = None,
        rotary_pos_sin: Tensor | None = None,
        rotary_pos_cos_sin: Tensor | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params=None,
        sequence_len_offset: int | None = None,
        view: ParameterView = direct,
        **_,
    ) -> tuple[Tensor, None]:
        """Compute attention: hidden_states [s, b, h] normed, rotary_pos_emb [s, 1 or b, 1, r] radians -> (output [s, b,
        h], None).

        The mask is causal; attention_mask is passed to the core attention. packed_seq_params: document boundaries, as
        PackedDocuments. inference_context: this layer's DecodeState, to which the tokens are added; packed_seq_params
        is then None. `vectors` are used through `view`. Raises ValueError for other packed sequences and states.
        """
        packed = packed_seq_params
        if not (packed is None or isinstance(packed, PackedDocuments)):
            raise mistake(
                "packed_seq_params",
                type(packed).__name__,
                problem="the convolutions would mix documents",
                allowed="zaya_plugin.parallel.packed_documents.PackedDocuments",
                fix="data.packing=documents in a recipe",
            )
        state = inference_context
        if not (state is None or isinstance(state, DecodeState)):
            raise mistake(
                "inference_context",
                type(state).__name__,
                problem="it has no place for the convolutions' state",
                allowed="zaya_plugin.model.decode_state.DecodeState",
                fix="zaya generate",
            )
        assert key_value_states is None and attention_bias is None
        if rotary_pos_emb is not None:
            # Megatron computes the angles on the GPU, if there is one, also for a model on the CPU.
            rotary_pos_emb = rotary_pos_emb.to(hidden_states.device)
        starts = None if packed is None else packed.starts
        if state is None:
            projected = self._project_with_halo(hidden_states)
        else:
            projected = self.project(hidden_states), state.z.unsqueeze(0), state.delayed.unsqueeze(0)
        query, key, value = self._prologue(*projected, rotary_pos_emb, starts, view)
        attend = functools.partial(self._attend, packed)
        if state is not None:
            z, _, delayed = self.split_projected(projected[0])
            state.keep(z, delayed, key, value)
        if state is not None and len(query) == 1:
            context = state.attend(query, self.core_attention.softmax_scale)
        elif self.recompute_core and self.training:
            context = tensor_parallel.checkpoint(attend, False, query, key, value, attention_mask)
        else:
            context = attend(query, key, value, attention_mask)
        if isinstance(self.linear_proj, RowParallelLinear) and self.tp_group.size() == 1:
            # the same product without the host time of Megatron's wrapper
            output = main_grad_linear(context, gathered(self.linear_proj).weight)
        else:
            output = self.linear_proj(context)[0]
        if self.adapters is not None:
            output = output + low_rank_linear(self.config, context, [self.adapters["linear_proj"]])
        return output, None

    def _prologue(self, projected, z_halo, value_halo, angles, starts, view) -> tuple[Tensor, Tensor, Tensor]:
        convolutions = (gathered(self.conv_qk_depthwise), gathered(self.conv_qk_grouped))
        weights = [self.local.of_queries_and_keys(view(t)) for conv in convolutions for t in (conv.weight, conv.bias)]
        return hip_ops.cca_prologue(
            projected,
            *weights,
            key_scale(self.local.of_heads(view(self.temperature)), self.config.temperature_form),
            None if angles is None else rope_table(angles, self.own_rotary_base),
            query_groups=self.query_groups,
            delayed_channels=self.delayed_channels,
            halo=z_halo,
            value_halo=value_halo,
            starts=starts,
        )

    def _project_with_halo(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return `project`'s result, and z [k, 2, b, C / t] and delayed values [k, b, *] of the rows before each of
        this rank's k chunks.

        Other context-parallel ranks hold these rows. With one rank both are None.
        """
        if self.shard.size == 1:
            return self.project(hidden_states), None, None
        chunks = len(self.shard.chunks)

        def exchange(projected):
            z, _, delayed = self.split_projected(projected)
            return BoundaryExchange(
                last_rows(z, chunks, 2), last_rows(delayed, chunks, 1)[:, 0], self.shard, self.context_group
            )

        if self.local.ranks == 1:
            # The boundary rows are projected twice, so that their exchange overlaps the projection of all rows.
            under_way = exchange(self.project(last_rows(hidden_states, chunks, 2).flatten(0, 1)))
            projected = self.project(hidden_states)
        else:  # the boundary rows lie on one tensor-parallel rank and the heads on all of them
            projected = self.project(hidden_states)
            under_way = exchange(projected)
        return projected, *under_way.finish()

    def _attend(self, packed, query, key, value, attention_mask):
        return self.core_attention(
            query, key, value, attention_mask, attn_mask_type=self.attn_mask_type, packed_seq_params=packed
        )


@dataclass(frozen=True)
class LocalHeads:
    """The query groups [rank g / ranks, (rank + 1) g / ranks) and their query heads, on one of `ranks` tensor-parallel
    ranks, and this rank's rows of the parameters that every rank holds whole.

    Query groups are distributed in order, each with its query heads, so that no attention head needs another rank. The
    heads of the values are [current half | delayed half]: with two groups and two ranks the first rank has the current
    head and the second rank the delayed head.

    heads, query_groups: numbers in the whole model, n and g.
    head_dim: channels of a head, d.
    """

    rank: int
    ranks: int
    heads: int
    query_groups: int
    head_dim: int

    def of_heads(self, x: Tensor) -> Tensor:
        """Return this rank's rows of x, which has equally many rows for each query group."""
        return x if self.ranks == 1 else x.chunk(self.ranks)[self.rank]

    def of_queries_and_keys(self, x: Tensor) -> Tensor:
        """Return this rank's rows of x [(n + g) d, ...], in the order of the convolutions' channels."""
        if self.ranks == 1:
            return x
        query, key = x.split((self.heads * self.head_dim, self.query_groups * self.head_dim))
        return torch.cat((query.chunk(self.ranks)[self.rank], key.chunk(self.ranks)[self.rank]))

    @property
    def delayed_channels(self) -> int:
        """Number of this rank's value channels that lag one token: those in the second half of all value channels."""
        channels, share = self.query_groups * self.head_dim, self.query_groups * self.head_dim // self.ranks
        return min(share, max((self.rank + 1) * share - channels // 2, 0))

    def of_values(self, current: Tensor, delayed: Tensor) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of the two halves [g d / 2, ...] of the value channels; one of them may be empty."""
        half, share = len(current), 2 * len(current) // self.ranks
        start, end = self.rank * share, (self.rank + 1) * share
        return current[min(start, half) : min(end, half)], delayed[max(start - half, 0) : max(end - half, 0)]


def key_scale(temperature: Tensor, form: str) -> Tensor:
    """Return the length of the keys relative to sqrt(d); temperature [g] -> [g]. `form` as
    ZayaConfig.temperature_form.
    """
    if form == "linear":
        return temperature
    temperature = temperature.to(hip_ops.wide(temperature.dtype))
    if form == "exp":
        return temperature.exp()
    assert form == "clamped_exp", form
    return temperature.clamp(1e-7, 2.0).exp()


_rope_tables: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def rope_table(angles: Tensor, base: int | None = None) -> Tensor:
    """Return (cos, sin) of angles [s, 1 or b, 1, r] as `hip_ops.cca_prologue` takes them; computed once for all layers
    that get the same angles. base: of a layer with a sliding window, whose RoPE has another base than `angles`.
    """
    tables = _rope_tables.setdefault(angles, {})
    if base not in tables:
        tables[base] = hip_ops.rope_table(angles if base is None else with_base(angles, base))
    return tables[base]


def with_base(angles: Tensor, base: int) -> Tensor:
    """Return RoPE's angles [s, 1 or b, 1, r] in radians of the same positions with another base (arXiv 2104.09864).

    The first channel turns by one radian a position with every base, so its angle is the position.
    """
    channels = angles.shape[-1]
    exponents = torch.arange(0, channels, 2, dtype=torch.float32, device=angles.device) / channels
    half = angles[..., :1] * (1.0 / base**exponents)
    return torch.cat((half, half), dim=-1)
