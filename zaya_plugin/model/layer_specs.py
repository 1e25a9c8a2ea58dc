# SPDX-License-Identifier: Apache-2.0
"""Module specs: which classes make up a ZAYA1 layer and block.

`zaya_block_spec` and `get_zaya_layer_spec` are for GPTModel's transformer_layer_spec; both bring our final norm, which
reads the fp32 residual stream.

config.transformer_impl chooses the class of the linears of queries, keys and attention's output: Megatron's own, or
Transformer Engine's through Megatron's wrappers. All other parts are ZAYA's own with either: Transformer Engine's norm
rounds the fp32 stream before its statistics, its experts take 1.8 times as long (H200, TE 2.20.2), and its attention is
a version of config.core_attention.
"""

from __future__ import annotations

import functools

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from torch import Tensor, nn

from hip_ops.runtime.main_grad import main_grad_of
from zaya_plugin.ground.errors import mistake
from zaya_plugin.model.attention import ZayaAttentionSubmodules, ZayaSelfAttention
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.core_attention import ZayaCoreAttention
from zaya_plugin.model.experts import GroupedExperts
from zaya_plugin.model.layer import ZayaLayerSubmodules, ZayaTransformerLayer
from zaya_plugin.model.moe import ZayaMoELayer
from zaya_plugin.model.residual import norm_class


class WithoutExtraState(nn.Module):
    """Base class of a linear whose `_extra_state` is neither saved in a checkpoint nor demanded from one.

    It holds Transformer Engine's fp8 scales; without fp8 it is empty. Megatron's own linears have an empty one too.
    Without it a checkpoint loads with either value of transformer_impl.
    """

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self.register_load_state_dict_pre_hook(_complete)

    def sharded_state_dict(self, prefix: str = "", *args, **named) -> dict:
        """As Megatron's, without `_extra_state`."""
        state = super().sharded_state_dict(prefix, *args, **named)  # ty: ignore[missing-attribute]  # the linear's
        state.pop(f"{prefix}_extra_state", None)
        return state


def _complete(module: nn.Module, state: dict, prefix: str, *_) -> None:
    state.setdefault(f"{prefix}_extra_state")  # None: both libraries' set_extra_state ignore it


class AddsToMainGrad(nn.Module):
    """Base class of a Transformer Engine linear that adds its weight's gradient to DDP's fp32 buffer, if there is one.

    Otherwise the gradient would be rounded to bf16 before the addition. Both attributes are Transformer Engine's:
    `fuse_wgrad_accumulation=True` raises without a buffer. `is_first_microbatch=True` overwrites the buffer; Megatron
    sets it for the first call of a module, and context parallelism calls the projections twice a forward pass.
    """

    weight: Tensor

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [s, b, in] -> ([s, b, out], None)."""
        self.fuse_wgrad_accumulation = main_grad_of(self.weight) is not None
        self.is_first_microbatch = False
        return super().forward(x)


@functools.cache
def _derived(linear: type, *bases: type) -> type:
    return type(linear.__name__, (*bases, linear), {})


def linear_classes(config: ZayaConfig) -> tuple[type, type]:
    """Return the column-parallel and row-parallel linear of config.transformer_impl.

    Raises:
        ValueError: Transformer Engine is requested and not installed.
    """
    if config.transformer_impl == "local":
        return _derived(ColumnParallelLinear, WithoutExtraState), _derived(RowParallelLinear, WithoutExtraState)
    from megatron.core.extensions import transformer_engine as te

    if not te.HAVE_TE:
        raise mistake(
            "transformer_impl",
            config.transformer_impl,
            problem="Transformer Engine is not installed",
            allowed="local",
            fix="cluster.transformer_impl=local",
        )
    bases = AddsToMainGrad, WithoutExtraState
    return _derived(te.TEColumnParallelLinear, *bases), _derived(te.TERowParallelLinear, *bases)


def zaya_layer_submodules(config: ZayaConfig) -> ZayaLayerSubmodules:
    """Return the parts of a layer."""
    (linear, linear_proj), norm = linear_classes(config), norm_class(config)
    attention = ZayaAttentionSubmodules(linear=linear, core_attention=ZayaCoreAttention, linear_proj=linear_proj)
    return ZayaLayerSubmodules(
        input_layernorm=norm,
        self_attention=ModuleSpec(module=ZayaSelfAttention, submodules=attention),
        pre_mlp_layernorm=norm,
        mlp=ModuleSpec(module=ZayaMoELayer, submodules=ModuleSpec(module=GroupedExperts)),
    )


def get_zaya_layer_spec(config: ZayaConfig, vp_stage: int | None = None) -> ModuleSpec:
    """Return `zaya_block_spec` as a ModuleSpec, as Megatron's `get_gpt_layer_*_spec` functions do."""
    return ModuleSpec(module=TransformerBlock, submodules=zaya_block_spec(config, vp_stage))


def zaya_block_spec(config: ZayaConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Spec of this pipeline stage's layers and of the final norm, for GPTModel's transformer_layer_spec.

    The block builds the final norm on the last stage only. vp_stage: virtual stage, None without interleaving. Raises
    ValueError if a stage would have no layer, since the router state could not pass it.
    """
    layers = config.num_layers
    if config.pipeline_model_parallel_size > 1:
        layers = get_num_layers_to_build(config, vp_stage)
        if layers == 0:
            raise mistake(
                "num_layers",
                config.num_layers,
                problem=(
                    f"pipeline_model_parallel_size={config.pipeline_model_parallel_size} leaves a stage without layers"
                ),
                allowed="at least one layer a stage",
                fix="a smaller parallel.pipeline_model_parallel_size",
            )
    layer = ModuleSpec(module=ZayaTransformerLayer, submodules=zaya_layer_submodules(config))
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm_class(config))
