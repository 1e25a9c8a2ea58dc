# SPDX-License-Identifier: Apache-2.0
"""Module specs: which classes make up a ZAYA1 layer and block.

`zaya_block_spec` is the one to use: it brings our final norm, which reads the fp32 residual stream.
`get_zaya_layer_spec` leaves the final norm to Megatron's block.
"""

from __future__ import annotations

from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from zaya_plugin.errors import mistake
from zaya_plugin.model.attention import ZayaAttentionSubmodules, ZayaSelfAttention
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.core_attention import ZayaCoreAttention
from zaya_plugin.model.experts import GroupedExperts
from zaya_plugin.model.layer import ZayaLayerSubmodules, ZayaTransformerLayer
from zaya_plugin.model.moe import ZayaMoELayer
from zaya_plugin.model.norm import ZayaRMSNorm


def local_submodules() -> ZayaLayerSubmodules:
    """Layer parts on PyTorch and Megatron's own parallel linears."""
    return _submodules(
        ZayaRMSNorm, ColumnParallelLinear, ZayaCoreAttention, RowParallelLinear, ModuleSpec(module=GroupedExperts)
    )


def transformer_engine_submodules() -> ZayaLayerSubmodules:
    """Layer parts on Transformer Engine through Megatron's wrappers; raises ValueError if it is not installed.

    Experts fall back to the local grouped GEMM with a Transformer Engine that has no grouped linear (before 1.9).
    """
    from megatron.core.extensions import transformer_engine as te

    if not te.HAVE_TE:
        raise mistake(
            "transformer_impl",
            "transformer_engine",
            problem="Transformer Engine is not installed",
            allowed="local",
            fix="cluster.transformer_impl=local",
        )
    experts = ModuleSpec(module=GroupedExperts)
    if te.TEColumnParallelGroupedLinear is not None:
        from zaya_plugin.model.te_experts import TEGroupedExperts

        grouped = dict(linear_fc1=te.TEColumnParallelGroupedLinear, linear_fc2=te.TERowParallelGroupedLinear)
        experts = ModuleSpec(module=TEGroupedExperts, params=grouped)
    return _submodules(te.TENorm, te.TEColumnParallelLinear, te.TEDotProductAttention, te.TERowParallelLinear, experts)


def _submodules(norm, linear, core_attention, linear_proj, experts) -> ZayaLayerSubmodules:
    attention = ZayaAttentionSubmodules(linear=linear, core_attention=core_attention, linear_proj=linear_proj)
    return ZayaLayerSubmodules(
        input_layernorm=norm,
        self_attention=ModuleSpec(module=ZayaSelfAttention, submodules=attention),
        pre_mlp_layernorm=norm,
        mlp=ModuleSpec(module=ZayaMoELayer, submodules=experts),
    )


def zaya_layer_submodules(config: ZayaConfig) -> ZayaLayerSubmodules:
    """Layer parts by config.transformer_impl."""
    return transformer_engine_submodules() if config.transformer_impl == "transformer_engine" else local_submodules()


def get_zaya_layer_spec(config: ZayaConfig) -> ModuleSpec:
    """Spec of one layer, for a GPTModel whose block puts Megatron's own final norm behind the layers.

    That norm and the head take no fp32 stream, so the last layer rounds the stream to params_dtype: equal to
    `zaya_block_spec` in fp32, a bf16 rounding apart in bf16.
    """
    return ModuleSpec(
        module=ZayaTransformerLayer, submodules=zaya_layer_submodules(config), params={"cast_output": True}
    )


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
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=ZayaRMSNorm)
