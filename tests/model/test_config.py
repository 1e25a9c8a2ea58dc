# SPDX-License-Identifier: Apache-2.0
"""ZayaConfig: values that it refuses, and fields that it derives."""

import dataclasses

import pytest
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from zaya_plugin.model.config import ZayaConfig

REFUSED = [
    ("num_query_groups", 3, "divisor"),
    ("num_query_groups", 1, "even"),
    ("kv_channels", 7, "even"),
    ("cca_time0", 3, "two taps"),
    ("cca_time1", 4, "two taps"),
    ("moe_router_topk", 2, "one class per token"),
    ("normalization", "BatchNorm", "RMSNorm, LayerNorm"),
    ("gated_linear_unit", False, "SwiGLU"),
    ("activation_func", F.gelu, "SwiGLU"),
    ("add_bias_linear", True, "no bias"),
    ("hidden_dropout", 0.1, "no dropout"),
    ("attention_dropout", 0.1, "no dropout"),
    ("temperature_form", "square", "linear, exp, clamped_exp"),
    ("skip_output", "half", "zero, identity"),
    ("transformer_impl", "fused", "local, transformer_engine"),
    ("tensor_model_parallel_size", 4, "a divisor of num_query_groups=2"),
    ("expert_model_parallel_size", 3, "a divisor of num_moe_experts=4"),
    ("expert_tensor_parallel_size", 2, "experts are not split"),
    ("qk_layernorm", True, "not a part"),
    ("moe_aux_loss_coeff", 0.01, "biases alone"),
    ("moe_z_loss_coeff", 0.001, "not a part"),
    ("router_init_std", 0.0, r"a number above 0, at most 100.0 \(.*\), or null"),
    ("balancing_beta1", 1.0, "from 0 to below 1"),
    ("router_hidden_size", 0, "above 0"),
    ("cuda_graph_impl", "local", "none, full_iteration"),
]
if "use_mup" in ZayaConfig.__dataclass_fields__:
    REFUSED.append(("use_mup", True, "not a part"))


@pytest.mark.skipif(
    "cuda_graph_modules" not in ZayaConfig.__dataclass_fields__, reason="megatron-core 0.16 captures no whole step"
)
def test_a_graph_of_the_whole_step_is_taken(make_config):
    assert make_config(cuda_graph_impl="full_iteration", cuda_graph_modules=[]).cuda_graph_impl == "full_iteration"


@pytest.mark.parametrize("name, value, reason", REFUSED)
def test_refused(make_config, name, value, reason):
    with pytest.raises(ValueError, match=rf"{name}=.*{reason}"):
        make_config(**{name: value})


def test_tensor_parallelism_brings_sequence_parallelism(make_config):
    with pytest.raises(ValueError, match="sequence_parallel=false: .*Allowed: True with tensor_model_parallel_size=2"):
        make_config(tensor_model_parallel_size=2, expert_tensor_parallel_size=1)
    make_config(tensor_model_parallel_size=2, expert_tensor_parallel_size=1, sequence_parallel=True)


def test_recompute_modules(make_config):
    make_config(recompute_granularity="selective", recompute_modules=["core_attn", "moe", "layernorm"])
    with pytest.raises(ValueError, match=r"recompute_modules=\['mlp'\].*core_attn.*layernorm.*moe"):
        make_config(recompute_granularity="selective", recompute_modules=["mlp"])


def test_derived_fields(make_config):
    config = make_config(layernorm_epsilon=2e-5, residual_in_fp32=False)
    assert config.router_norm_epsilon == 2e-5 and make_config(router_norm_epsilon=1e-6).router_norm_epsilon == 1e-6
    assert config.hetereogenous_dist_checkpoint and config.moe_router_pre_softmax
    assert not config.fp32_residual_connection and make_config().fp32_residual_connection
    assert config.num_router_classes == 5 and make_config(moe_skip_expert=False).num_router_classes == 4
    assert config.output_init_method is config.init_method
    scaled = make_config(scaled_output_init=True)
    assert scaled.output_init_method.keywords["std"] == pytest.approx(0.02 / 8**0.5)


def test_own_fields_are_plain_scalars():
    """Our fields are plain scalars, which core_transformer_config_from_args can copy from command-line arguments; so is a
    list of names.
    """
    inherited = {f.name for f in dataclasses.fields(TransformerConfig)}
    own = [f for f in dataclasses.fields(ZayaConfig) if f.name not in inherited]
    assert len(own) >= 18
    (names,) = [f.default_factory() for f in own if f.name == "lora_targets"]
    assert type(names) is list and {type(name) for name in names} == {str}
    assert all(f.default is None or type(f.default) in (bool, int, float, str) for f in own if f.name != "lora_targets")
