# SPDX-License-Identifier: Apache-2.0
"""Converts state dicts to and from transformers' ZayaForCausalLM, by one table of parameter names for both directions.

`{l}` runs over layers, `{e}` over experts. A row with `{e}` only on the left stacks the experts' matrices into one
tensor with a leading expert dimension; every other row renames. Shapes are equal on both sides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from zaya_plugin.config.messages import check_transformers_has
from zaya_plugin.errors import mistake

_LAYER = "decoder.layers.{l}."
_ATTENTION, _ROUTER, _EXPERTS = _LAYER + "self_attention.", _LAYER + "mlp.router.", _LAYER + "mlp.experts."
_HF_LAYER = "model.layers.{l}."
_HF_ATTENTION, _HF_ROUTER = _HF_LAYER + "self_attn.", _HF_LAYER + "mlp.gate."

# (name here, name in transformers)
NAME_MAP: tuple[tuple[str, str], ...] = (
    ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
    ("decoder.layers.0.input_affine.scale", "model.input_hidden_states_scale"),
    ("decoder.layers.0.input_affine.bias", "model.input_hidden_states_bias"),
    (_LAYER + "input_layernorm.weight", _HF_LAYER + "input_layernorm.weight"),
    (_ATTENTION + "linear_q.weight", _HF_ATTENTION + "qkv_proj.q_proj.weight"),
    (_ATTENTION + "linear_k.weight", _HF_ATTENTION + "qkv_proj.k_proj.weight"),
    (_ATTENTION + "linear_v_current.weight", _HF_ATTENTION + "qkv_proj.v_proj_current.weight"),
    (_ATTENTION + "linear_v_delayed.weight", _HF_ATTENTION + "qkv_proj.v_proj_delayed.weight"),
    (_ATTENTION + "conv_qk_depthwise.weight", _HF_ATTENTION + "qkv_proj.conv_qk_depthwise.weight"),
    (_ATTENTION + "conv_qk_depthwise.bias", _HF_ATTENTION + "qkv_proj.conv_qk_depthwise.bias"),
    (_ATTENTION + "conv_qk_grouped.weight", _HF_ATTENTION + "qkv_proj.conv_qk_grouped.weight"),
    (_ATTENTION + "conv_qk_grouped.bias", _HF_ATTENTION + "qkv_proj.conv_qk_grouped.bias"),
    (_ATTENTION + "temperature", _HF_ATTENTION + "qk_norm.temp"),
    (_ATTENTION + "linear_proj.weight", _HF_ATTENTION + "o_proj.weight"),
    (_LAYER + "post_attention_residual.output_scale", _HF_LAYER + "post_attention_residual_scale.hidden_states_scale"),
    (_LAYER + "post_attention_residual.output_bias", _HF_LAYER + "post_attention_residual_scale.hidden_states_bias"),
    (_LAYER + "post_attention_residual.residual_scale", _HF_LAYER + "post_attention_residual_scale.residual_scale"),
    (_LAYER + "post_attention_residual.residual_bias", _HF_LAYER + "post_attention_residual_scale.residual_bias"),
    (_LAYER + "pre_mlp_layernorm.weight", _HF_LAYER + "post_attention_layernorm.weight"),
    (_ROUTER + "down_proj.weight", _HF_ROUTER + "down_proj.weight"),
    (_ROUTER + "down_proj.bias", _HF_ROUTER + "down_proj.bias"),
    (_ROUTER + "router_states_scale", _HF_ROUTER + "router_states_scale"),
    (_ROUTER + "norm.weight", _HF_ROUTER + "router_mlp.norm.weight"),
    (_ROUTER + "fc1.weight", _HF_ROUTER + "router_mlp.fc1.weight"),
    (_ROUTER + "fc1.bias", _HF_ROUTER + "router_mlp.fc1.bias"),
    (_ROUTER + "fc2.weight", _HF_ROUTER + "router_mlp.fc2.weight"),
    (_ROUTER + "fc2.bias", _HF_ROUTER + "router_mlp.fc2.bias"),
    (_ROUTER + "out_proj.weight", _HF_ROUTER + "router_mlp.out_proj.weight"),
    (_ROUTER + "balancing_biases", _HF_ROUTER + "balancing_biases"),
    (_EXPERTS + "linear_fc1.weight{e}", _HF_LAYER + "mlp.experts.gate_up_proj"),
    (_EXPERTS + "linear_fc2.weight{e}", _HF_LAYER + "mlp.experts.down_proj"),
    (_LAYER + "post_mlp_residual.output_scale", _HF_LAYER + "post_mlp_residual_scale.hidden_states_scale"),
    (_LAYER + "post_mlp_residual.output_bias", _HF_LAYER + "post_mlp_residual_scale.hidden_states_bias"),
    (_LAYER + "post_mlp_residual.residual_scale", _HF_LAYER + "post_mlp_residual_scale.residual_scale"),
    (_LAYER + "post_mlp_residual.residual_bias", _HF_LAYER + "post_mlp_residual_scale.residual_bias"),
    ("decoder.final_layernorm.weight", "model.norm.weight"),
)

# Rows that do not exist in layer 1.
NOT_IN_FIRST_LAYER = frozenset({_ROUTER + "router_states_scale"})

# State of the balancing optimizer; transformers has no such tensors: dropped on export, zero after import.
ONLY_HERE: tuple[tuple[str, torch.dtype], ...] = (
    (_ROUTER + "balancing_exp_avg", torch.float32),
    (_ROUTER + "balancing_exp_avg_sq", torch.float32),
    (_ROUTER + "balancing_step", torch.int64),
)

HF_TIED_HEAD, HF_EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def to_hf(state_dict: Mapping[str, Tensor], config, *, include_tied_head: bool = False) -> dict[str, Tensor]:
    """Return the state dict of transformers' ZayaForCausalLM for that of our GPTModel.

    Args:
        state_dict: as `model.state_dict()` of an unwrapped model; `_extra_state` entries are ignored.
        config: ZayaConfig (num_layers, num_moe_experts, router_eda, normalization are read).
        include_tied_head: also return `lm_head.weight`, the same tensor as the embedding.

    Raises:
        ValueError: names are missing or unknown, and the message lists all of them; config.normalization=LayerNorm.
    """
    only_here = {name.format(l=layer) for name, _ in ONLY_HERE for layer in range(config.num_layers)}
    rest = {k: v for k, v in state_dict.items() if not k.endswith("_extra_state") and k not in only_here}
    rows = list(_rows(config))
    _check_names(rest, [name for names, _ in rows for name in names], "this package's ZAYA model")
    out = {hf: rest[names[0]] if len(names) == 1 else torch.stack([rest[name] for name in names]) for names, hf in rows}
    if include_tied_head:
        out[HF_TIED_HEAD] = out[HF_EMBEDDING]
    return out


def from_hf(state_dict: Mapping[str, Tensor], config) -> dict[str, Tensor]:
    """Return the state dict for our GPTModel of that of transformers' ZayaForCausalLM. Expert matrices are views.

    Arguments and errors as in to_hf; raises ValueError if `lm_head.weight` is present and differs from the embedding.
    """
    rest = dict(state_dict)
    head = rest.pop(HF_TIED_HEAD, None)
    rows = list(_rows(config))
    _check_names(rest, [hf for _, hf in rows], "transformers' ZayaForCausalLM")
    if head is not None and not torch.equal(head, rest[HF_EMBEDDING]):
        raise mistake(HF_TIED_HEAD, problem=f"differs from {HF_EMBEDDING}", allowed="models with a tied head")
    out: dict[str, Tensor] = {}
    for names, hf in rows:
        if len(names) == 1:
            out[names[0]] = rest[hf]
        elif len(rest[hf]) != len(names):
            raise mistake(
                hf, problem=f"holds {len(rest[hf])} experts", allowed=f"{len(names)}, as in the configuration"
            )
        else:
            out.update(zip(names, rest[hf].unbind(), strict=True))
    for name, dtype in ONLY_HERE:
        for layer in range(config.num_layers):
            biases = out[_ROUTER.format(l=layer) + "balancing_biases"]
            shape = () if dtype == torch.int64 else biases.shape
            out[name.format(l=layer)] = torch.zeros(shape, dtype=dtype, device=biases.device)
    return out


def _rows(config) -> Iterator[tuple[list[str], str]]:
    """Return the table with wildcards filled in: (names here, name in transformers); several names are stacked."""
    check_transformers_has(config.normalization)
    for ours, hf in NAME_MAP:
        for layer in range(config.num_layers) if "{l}" in ours else (None,):
            if ours in NOT_IN_FIRST_LAYER and (layer == 0 or not config.router_eda):
                continue
            experts = range(config.num_moe_experts) if "{e}" in ours else (None,)
            yield [ours.format(l=layer, e=expert) for expert in experts], hf.format(l=layer)


def _check_names(state_dict: Mapping[str, Tensor], expected: list[str], whose: str) -> None:
    missing = sorted(set(expected) - state_dict.keys())
    unknown = sorted(state_dict.keys() - set(expected))
    if missing or unknown:
        problem = f"not one of {whose} with this configuration: missing {missing}, unknown {unknown}"
        raise mistake("state dict", problem=problem)
