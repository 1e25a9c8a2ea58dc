# SPDX-License-Identifier: Apache-2.0
"""ZayaConfig: Megatron's TransformerConfig with ZAYA1's options; every disputed modelling choice is a field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import init_method_normal
from torch import Tensor

from zaya_plugin.config.messages import refused
from zaya_plugin.config.schema import (
    RECOMPUTE_MODULES,
    ClusterConfig,
    ModelConfig,
    ZayaOptions,
    leaves,
    megatron_argument,
)
from zaya_plugin.ground.errors import mistake

_OWN_RECOMPUTE_MODULES = {"permute"}

# Field -> the only value that ZAYA1 has, and why; None stands for any value that is false.
_FIXED = {
    **dict.fromkeys(("cca_time0", "cca_time1"), (2, "the convolutions have two taps, as in every released model")),
    "moe_router_topk": (1, "the router selects one class per token"),
    "gated_linear_unit": (True, "experts are SwiGLU (--swiglu)"),
    **dict.fromkeys(("add_bias_linear", "add_qkv_bias"), (False, "linear layers have no bias")),
    **dict.fromkeys(("hidden_dropout", "attention_dropout"), (0.0, "the model has no dropout")),
    **dict.fromkeys(
        (
            "multi_latent_attention",
            "qk_layernorm",
            "layernorm_zero_centered_gamma",
            "rotary_interleaved",
            "moe_router_enable_expert_bias",
            "fine_grained_activation_offloading",
            "use_mup",
        ),
        (False, "this is not a part of the model"),
    ),
    **dict.fromkeys(
        (
            "fp8",
            "fp4",
            "window_size",  # sliding_window has its place
            "mtp_num_layers",
            "moe_shared_expert_intermediate_size",
            "moe_expert_capacity_factor",
            "moe_z_loss_coeff",
            "moe_input_jitter_eps",
        ),
        (None, "this is not a part of the model"),
    ),
}


@dataclass
class ZayaConfig(ZayaOptions, TransformerConfig):
    """Configuration of a ZAYA1 model (arXiv 2605.05365; transformers `ZayaConfig`).

    Fields are those of TransformerConfig, those that `zaya_plugin.config.schema` declares with `option` (skip_output,
    temperature_form, balancing_lr, ...; sources and alternatives are stated there), and those below, which have no
    recipe key. All are plain scalars, so that `core_transformer_config_from_args(args, ZayaConfig)` can fill them.
    Raises ValueError for values that the model does not support.
    """

    num_moe_experts: int | None = ModelConfig.num_experts
    """Routed experts, without the skip class. (Megatron's field, ZAYA1's value.)"""

    moe_router_topk: int = 1
    """Experts per token; ZAYA1 is top-1 and nothing else is supported."""

    gated_linear_unit: bool = True
    activation_func: Callable[[Tensor], Tensor] = F.silu
    # The schema has the choices of these, and `_check` refuses others.
    normalization: str = ModelConfig.normalization  # ty: ignore[incompatible-attribute-override]
    add_bias_linear: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0

    transformer_impl: str = ClusterConfig.transformer_impl  # ty: ignore[incompatible-attribute-override]
    """Linears of queries, keys and attention's output: Megatron's own (`local`), or those of Transformer Engine."""

    cca_time0: int = 2
    """Taps of the depthwise convolution over time. Only 2 is supported."""

    cca_time1: int = 2
    """Taps of the per-head grouped convolution over time. Only 2 is supported."""

    if TYPE_CHECKING:  # the fields of ZayaOptions are made from the schema, which a type checker cannot see

        def __init__(self, **fields: Any) -> None: ...

    @property
    def num_router_classes(self) -> int:
        """Experts plus the skip class."""
        assert self.num_moe_experts is not None, "`_check` refuses it"
        return self.num_moe_experts + int(self.moe_skip_expert)

    @property
    def pipeline_state_size(self) -> int:
        """Channels of the router state, which pipeline stages send behind the hidden_size channels of the residual
        stream.
        """
        return self.router_hidden_size if self.router_eda and self.pipeline_model_parallel_size > 1 else 0

    def window_of(self, layer_number: int) -> int | None:
        """Return the previous tokens that a token sees in a layer, numbered from 1; None: all of them."""
        every = self.window_attn_skip_freq
        return None if every and layer_number % every == 0 else self.sliding_window

    @property
    def router_init_method(self):
        """Initialiser of the router's matrices."""
        return self.init_method if self.router_init_std is None else init_method_normal(self.router_init_std)

    @property
    def output_init_method(self):
        """Initialiser of the matrices that write to the residual stream."""
        return self.output_layer_init_method if self.scaled_output_init else self.init_method

    def __post_init__(self):
        # Megatron requires this flag when topk is 1; ZAYA's router always applies the softmax before it selects.
        self.moe_router_pre_softmax = True
        self.fp32_residual_connection = self.residual_in_fp32
        modules = self.recompute_modules
        if modules is not None:  # Megatron refuses names that it does not know
            self.recompute_modules = [name for name in modules if name not in _OWN_RECOMPUTE_MODULES]
        super().__post_init__()
        if modules is not None:
            self.recompute_modules = modules
        self._check()
        if self.router_norm_epsilon is None:
            self.router_norm_epsilon = self.layernorm_epsilon
        # Layer 1 holds the input affine and no gamma, so layers cannot share one stacked checkpoint tensor.
        self.hetereogenous_dist_checkpoint = True

    def _check(self):
        """Raise ValueError for the first field whose value the model does not support."""

        def require(name, ok, problem, allowed, fix=None):
            if not ok:
                value = getattr(self, name)
                raise mistake(
                    name, value, problem=problem, allowed=allowed, fix=f"{name}={allowed if fix is None else fix}"
                )

        def fixed(name, value, reason):
            own = getattr(self, name, value)  # an earlier megatron-core may lack the field
            require(name, own == value or (value is None and not own), reason, repr(value))

        for _, field in leaves():  # choices and ranges are the recipe's
            name = megatron_argument(field)
            if name in self.__dataclass_fields__ and (problem := refused(name, field, getattr(self, name))):
                raise ValueError(problem)
        for name, (value, reason) in _FIXED.items():
            fixed(name, value, reason)
        require("activation_func", self.activation_func is F.silu, "experts are SwiGLU", "torch.nn.functional.silu")
        require("num_moe_experts", bool(self.num_moe_experts), "the model has experts", "a number above 0", 16)
        heads, groups = self.num_attention_heads, self.num_query_groups
        require(
            "num_query_groups",
            heads % groups == 0,
            "every key/value head serves as many query heads",
            f"a divisor of num_attention_heads={heads}",
            2,
        )
        require(
            "num_query_groups",
            groups % 2 == 0,
            "the value shift delays half of the key/value heads",
            "an even number",
            2,
        )
        require("kv_channels", self.kv_channels % 2 == 0, "RoPE rotates pairs of channels", "an even number", 128)
        tensor, experts = self.tensor_model_parallel_size, self.num_moe_experts
        require(
            "tensor_model_parallel_size",
            groups % tensor == 0,
            "a key/value head cannot be split",
            f"a divisor of num_query_groups={groups}",
            1,
        )
        require(
            "sequence_parallel",
            self.sequence_parallel == (tensor > 1),
            "with tensor parallelism, and only then, each rank routes its own tokens",
            f"{tensor > 1} with tensor_model_parallel_size={tensor}",
            tensor > 1,
        )
        require(
            "expert_model_parallel_size",
            experts % self.expert_model_parallel_size == 0,
            "every rank holds as many experts",
            f"a divisor of num_moe_experts={experts}",
            1,
        )
        fixed("expert_tensor_parallel_size", 1, "experts are not split; a token of any rank goes to a whole expert")
        coefficients = self.moe_aux_loss_coeff
        coefficients = coefficients if isinstance(coefficients, list) else [coefficients]
        require("moe_aux_loss_coeff", not any(coefficients), "ZAYA1 balances its experts by biases alone", "0.0")
        require(
            "cuda_graph_impl",
            self.cuda_graph_impl in ("none", "full_iteration"),
            "a graph of single layers is not supported",
            "none, full_iteration",
            "none",
        )
        if self.recompute_granularity == "selective":
            unknown = sorted({*self.recompute_modules} - {*RECOMPUTE_MODULES})
            require(
                "recompute_modules",
                not unknown,
                f"{unknown} name parts that ZAYA1 lacks (mlp, shared_experts, mla_up_proj, gdn_norm_out) or that its "
                "expert function always recomputes (moe_act)",
                f"a subset of {sorted(RECOMPUTE_MODULES)}",
                sorted({*self.recompute_modules} & {*RECOMPUTE_MODULES}),
            )
            if "permute" in self.recompute_modules:
                fixed(
                    "expert_model_parallel_size",
                    1,
                    "recompute_modules contains permute, and rows of other ranks would be sent again",
                )
