# SPDX-License-Identifier: Apache-2.0
"""ZayaConfig: Megatron's TransformerConfig plus what ZAYA1 adds, with every disputed modelling choice as a field."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import init_method_normal

from zaya_plugin.config.schema import RECOMPUTE_MODULES

_TEMPERATURE_FORMS = ("linear", "exp", "clamped_exp")
_SKIP_OUTPUTS = ("zero", "identity")
_OWN_RECOMPUTE_MODULES = {"permute"}


@dataclass
class ZayaConfig(TransformerConfig):
    """Configuration of a ZAYA1 model (arXiv 2605.05365; transformers `ZayaConfig`).

    Only plain scalar fields, so that `core_transformer_config_from_args(args, ZayaConfig)` can fill them. Where the
    published sources disagree, the default is what runs on the released weights (transformers `modeling_zaya.py`),
    and the docstring of the field names the alternatives. Raises ValueError for anything the model cannot do.
    """

    num_moe_experts: int | None = 16
    """Routed experts, without the skip class. (Megatron's field, ZAYA1's value.)"""

    moe_router_topk: int = 1
    """Experts per token; ZAYA1 is top-1 and nothing else is supported."""

    gated_linear_unit: bool = True
    activation_func: object = F.silu
    normalization: str = "RMSNorm"
    add_bias_linear: bool = False
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.0

    transformer_impl: str = "local"
    """`local`: this package's modules on PyTorch. `transformer_engine`: its linears, norms, attention and experts."""

    router_hidden_size: int = 256
    """Width of the router's latent state (`mlp_expansion` in the legacy Hub config)."""

    router_norm_epsilon: float | None = None
    """Epsilon of the router's RMSNorm; None takes layernorm_epsilon, as transformers does. The ZAYA1-base release code
    (Zyphra/transformers, branch zaya) reads a key that its config lacks and so ran with 1e-6."""

    router_init_std: float | None = None
    """Standard deviation of the router's initial matrices; None takes init_method_std, as transformers does. What
    training used is unknown. A narrow router needs a larger one (about 1/sqrt(router_hidden_size)): with 0.02 its first
    probabilities differ between tokens by less than a step of the balancing biases, which then choose alone."""

    router_eda: bool = True
    """Exponential depth averaging: the router adds gamma times the previous layer's router state. gamma is a vector of
    router_hidden_size in all code; the report's equation 2 can be read as one coefficient."""

    moe_skip_expert: bool = True
    """Score one more class than there are experts; its tokens skip the MoE. True in all released configs
    (`zaya_use_mod`), absent from the papers."""

    skip_output: str = "zero"
    """What a skipped token gets: `zero` (transformers >= 5.13, Zyphra's vLLM) or `identity`, its probability times the
    normed MoE input (November 2025 release code, SGLang, Primus). Never reached by released weights."""

    temperature_form: str = "linear"
    """Key temperature: `linear` T (arXiv 2605.05365 equation 29, all released code), `exp` exp(T) (arXiv 2510.04476
    listing 1) or `clamped_exp` exp(clamp(T, 1e-7, 2)) (`clamp_temp` in vLLM and SGLang, off in the 8.3B models)."""

    temperature_init: float = 1.0
    """Initial T. Released code initialises 0, which under `linear` makes every key zero; Primus uses 1; what training
    used is unknown."""

    cca_time0: int = 2
    """Taps of the depthwise convolution over time. Only 2 is supported."""

    cca_time1: int = 2
    """Taps of the per-head grouped convolution over time. Only 2 is supported."""

    residual_in_fp32: bool = True
    """Residual stream in fp32 (transformers, vLLM, the 8B config). The ZAYA1-base release code's class default is
    False; which one pretraining used is not stated."""

    z_loss: float = 0.0
    """Factor of logsumexp(logits)^2 in a token's training loss (arXiv 2204.02311)."""

    context_parallel_order: str = "zigzag"
    """Which part of a sequence a context-parallel rank holds: `zigzag`, two chunks, one from either end, so that all ranks
    have the same share of causal attention (Megatron's order); `contiguous`, one chunk."""

    core_attention: str = "sdpa"
    """Softmax attention under transformer_impl=local: `sdpa` (torch), `flash_attn`, `flash_attn_4` or `aiter` (those packages)."""

    scaled_output_init: bool = False
    """False: attention output and expert down projections start at init_method_std like all others (transformers
    `_init_weights`). True: Megatron's init_method_std / sqrt(2 * num_layers). What training used is unknown."""

    balancing_lr: float = 1e-3
    """Learning rate of the AdamW that moves the experts' balancing biases; the skip class keeps -1, as it did in the
    released weights. Unpublished; this project's choice (as Primus)."""

    balancing_beta1: float = 0.9
    """AdamW beta1 of the balancing biases; unpublished."""

    balancing_beta2: float = 0.999
    """AdamW beta2 of the balancing biases; unpublished."""

    balancing_eps: float = 1e-8
    """AdamW epsilon of the balancing biases; unpublished."""

    balancing_centering: bool = False
    """Keep the experts' balancing biases at zero mean (sibling model, arXiv 2606.24320). arXiv 2605.05365 has none."""

    @property
    def num_router_classes(self) -> int:
        """Experts plus the skip class."""
        return self.num_moe_experts + int(self.moe_skip_expert)

    @property
    def pipeline_state_size(self) -> int:
        """Channels that cross a pipeline stage behind the hidden_size ones: the router state."""
        return self.router_hidden_size if self.router_eda and self.pipeline_model_parallel_size > 1 else 0

    @property
    def router_init_method(self):
        """Initialiser of the router's matrices."""
        return self.init_method if self.router_init_std is None else init_method_normal(self.router_init_std)

    @property
    def output_init_method(self):
        """Initialiser of the matrices that write to the residual stream."""
        return self.output_layer_init_method if self.scaled_output_init else self.init_method

    def __post_init__(self):
        # Megatron asks for this flag when topk is 1; our router always takes the softmax before the choice.
        self.moe_router_pre_softmax = True
        self.fp32_residual_connection = self.residual_in_fp32
        modules = self.recompute_modules
        if modules is not None:  # Megatron refuses names that it does not know, and takes an empty list for none
            self.recompute_modules = [name for name in modules if name not in _OWN_RECOMPUTE_MODULES]
        super().__post_init__()
        if modules is not None:
            self.recompute_modules = modules
        self._finalize()

    def _finalize(self):
        self._check()
        if self.router_norm_epsilon is None:
            self.router_norm_epsilon = self.layernorm_epsilon
        # Layer 1 holds the input affine and no gamma, so layers cannot share one stacked checkpoint tensor.
        self.hetereogenous_dist_checkpoint = True

    def _check(self):
        def require(name, allowed, ok, how):
            if not ok:
                raise ValueError(f"{name}={getattr(self, name)!r}: ZAYA1 needs {allowed}; {how}")

        def one_of(name, values):
            require(name, f"one of {', '.join(values)}", getattr(self, name) in values, f"set {name} to one of them")

        def fixed(name, value, reason):
            require(name, repr(value), getattr(self, name) == value, f"{reason}; set {name}={value!r}")

        one_of("temperature_form", _TEMPERATURE_FORMS)
        one_of("skip_output", _SKIP_OUTPUTS)
        one_of("transformer_impl", ("local", "transformer_engine"))
        one_of("context_parallel_order", ("zigzag", "contiguous"))
        one_of("core_attention", ("sdpa", "flash_attn", "flash_attn_4", "aiter"))
        if self.transformer_impl == "transformer_engine":
            fixed("core_attention", "sdpa", "Transformer Engine brings its own attention")
            if self.context_parallel_size > 1:
                fixed("context_parallel_order", "zigzag", "Transformer Engine's attention knows this order alone")
        for name in ("cca_time0", "cca_time1"):
            fixed(name, 2, "the convolutions are written for two taps, as in every released model")
        fixed("moe_router_topk", 1, "the router picks one class per token")
        fixed("normalization", "RMSNorm", "every norm of the model is an RMSNorm")
        fixed("gated_linear_unit", True, "experts are SwiGLU (--swiglu)")
        require("activation_func", "torch.nn.functional.silu", self.activation_func is F.silu, "experts are SwiGLU")
        for name in ("add_bias_linear", "add_qkv_bias"):
            fixed(name, False, "linears have no bias")
        for name in ("hidden_dropout", "attention_dropout"):
            fixed(name, 0.0, "the model has no dropout")
        require("num_moe_experts", "a positive number", bool(self.num_moe_experts), "set num_moe_experts (16 in ZAYA1)")
        require(
            "router_init_std",
            "None or a positive number",
            self.router_init_std is None or self.router_init_std > 0,
            "leave it unset for init_method_std",
        )
        require("router_hidden_size", "a positive number", self.router_hidden_size > 0, "256 in ZAYA1")
        heads, groups = self.num_attention_heads, self.num_query_groups
        require("num_query_groups", f"a divisor of num_attention_heads={heads}", heads % groups == 0, "2 in ZAYA1")
        require(
            "num_query_groups",
            "an even number",
            groups % 2 == 0,
            "the value shift delays half of the key-value heads; 2 in ZAYA1",
        )
        require("kv_channels", "an even number", self.kv_channels % 2 == 0, "128 in ZAYA1")
        tensor, experts = self.tensor_model_parallel_size, self.num_moe_experts
        require(
            "tensor_model_parallel_size",
            f"a divisor of num_query_groups={groups}",
            groups % tensor == 0,
            "a key-value head belongs to one rank",
        )
        require(
            "sequence_parallel",
            repr(tensor > 1),
            self.sequence_parallel == (tensor > 1),
            f"it goes with tensor_model_parallel_size above 1 (is {tensor}): each rank routes its own tokens",
        )
        require(
            "expert_model_parallel_size",
            f"a divisor of num_moe_experts={experts}",
            experts % self.expert_model_parallel_size == 0,
            "every rank holds as many experts",
        )
        fixed("expert_tensor_parallel_size", 1, "experts are never cut; tokens of any rank go to a whole expert")
        one_of("moe_token_dispatcher_type", ("alltoall", "allgather"))
        for name in (
            "multi_latent_attention",
            "qk_layernorm",
            "layernorm_zero_centered_gamma",
            "rotary_interleaved",
            "moe_router_enable_expert_bias",
            "fine_grained_activation_offloading",
        ):
            fixed(name, False, "not a part of the model")
        for name in (
            "fp8",
            "fp4",
            "window_size",
            "mtp_num_layers",
            "moe_shared_expert_intermediate_size",
            "moe_expert_capacity_factor",
            "moe_z_loss_coeff",
            "moe_input_jitter_eps",
        ):
            require(name, "None", not getattr(self, name), f"not a part of the model; leave {name} unset")
        coefficients = self.moe_aux_loss_coeff
        coefficients = coefficients if isinstance(coefficients, list) else [coefficients]
        require(
            "moe_aux_loss_coeff",
            "0.0",
            not any(coefficients),
            "ZAYA1 balances by biases alone; set moe_aux_loss_coeff=0.0",
        )
        one_of("cuda_graph_impl", ("none", "full_iteration"))
        if self.recompute_granularity == "selective":
            unknown = sorted({*self.recompute_modules} - {*RECOMPUTE_MODULES})
            require(
                "recompute_modules",
                f"a subset of {sorted(RECOMPUTE_MODULES)}",
                not unknown,
                f"{unknown} name parts that ZAYA1 lacks (mlp, shared_experts, mla_up_proj, gdn_norm_out) or that "
                "its expert function always recomputes (moe_act)",
            )
            if "permute" in self.recompute_modules:
                fixed(
                    "transformer_impl",
                    "local",
                    "recompute_modules has permute, and Transformer Engine's experts keep their rows",
                )
                fixed(
                    "expert_model_parallel_size",
                    1,
                    "recompute_modules has permute, and rows of other ranks would have to travel again",
                )
