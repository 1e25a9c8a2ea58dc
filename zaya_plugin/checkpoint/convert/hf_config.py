# SPDX-License-Identifier: Apache-2.0
"""config.json of the published layouts, read and written. Imports no torch.

Reading accounts for every field: it is a size that the tensors confirm, a choice of Description, a constant of ZAYA1
that has to have its value, or it does not concern the model. A field that is none of these is named in a note.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.tables import ROUTER_EPSILON
from zaya_plugin.ground.errors import as_typed, mistake

_NONE = (None, False)
SLIDING = "hybrid_sliding"  # native's type of a layer with a sliding window
LARGEST_NUMBER = 2**53  # whole numbers up to this one are exact in every reader of JSON
# Field -> the values of a model that this project has, in all layouts.
CONSTANTS: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "activation_func": ("swiglu",),
    **dict.fromkeys(("num_experts_per_tok", "moe_router_topk"), (1,)),
    **dict.fromkeys(("cca_time0", "cca_time1"), (2,)),
    **dict.fromkeys(("tie_word_embeddings", "cca", "gated_linear_unit", "scale_residual_merge"), (True,)),
    **dict.fromkeys(("attention_bias", "lm_head_bias", "add_bias_linear", "add_qkv_bias"), _NONE),
    **dict.fromkeys(("attention_dropout", "hidden_dropout"), (0, None)),
    **dict.fromkeys(("rope_scaling", "use_rope_scaling", "quantization_config", "auto_map"), _NONE),
    **dict.fromkeys(("smoe_mod_per", "smoe_inhibitory", "smoe_p_switch"), (None, False, 0)),
    "model_type": ("zaya", "smoe"),
    "normalization": ("RMSNorm",),
}
# Fields that do not change what the model computes: of serving, of loading, and those that every file of transformers
# has.
ELSEWHERE = frozenset(
    "architectures dtype torch_dtype transformers_version _name_or_path use_cache output_router_logits "
    "output_attentions output_hidden_states return_dict chunk_size_feed_forward is_encoder_decoder id2label label2id "
    "problem_type attn_implementation _attn_implementation mamba_cache_dtype bias_activation_fusion "
    "activation_func_fp8_input_store zaya_high_prec smoe_high_prec bos_token_id eos_token_id pad_token_id "
    "initializer_range max_position_embeddings".split()
)


class _Fields:
    """A config.json, of which every field is taken once."""

    def __init__(self, values: dict[str, Any], where: str):
        self.values, self.where, self.taken = values, where, set(ELSEWHERE)

    def refuse(self, name: str, problem: str, allowed: str) -> ValueError:
        return mistake(f"{self.where}: {name}", self.values.get(name), problem=problem, allowed=allowed)

    def get(self, name: str, default: Any = None) -> Any:
        self.taken.add(name)
        value = self.values.get(name)
        return default if value is None else value

    def same(self, name: str, *allowed: Any) -> None:
        """Raise unless the field is absent, null or one of `allowed`."""
        if self.get(name) is not None and self.values[name] not in allowed:
            raise self.refuse(name, "the tensors' shapes show another value", " or ".join(map(str, allowed)))

    def either(self, name: str, other: str) -> Any:
        """Return what one of two fields states, None if neither does; raise if they contradict each other."""
        value, second = self.get(name), self.get(other)
        if None not in (value, second) and value != second:
            raise self.refuse(name, f"contradicts {other}={as_typed(second)}", "equal values, or one of the two fields")
        return second if value is None else value

    def number(self, name: str, default: float, most: float = math.inf) -> float:
        """Return a number above 0 and at most `most`, `default` if the field is absent or null; raise for others."""
        return self.checked(name, self.get(name, default), most)

    def checked(self, name: str, value: Any, most: float = math.inf) -> Any:
        """Return `value`, which the field states; raise unless it is a number above 0 and at most `most`."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most or value == math.inf:
            allowed = "a number above 0" + (f", at most {most:g}" if most < math.inf else "")
            raise self.refuse(name, f"{value!r} is not possible", allowed)
        return value

    def whole(self, name: str, value: Any) -> int:
        """Return `value`, which the field states; raise unless it is a whole number above 0."""
        if self.checked(name, value, LARGEST_NUMBER) != int(value):
            raise self.refuse(name, f"{value} is not supported", "a whole number")
        return int(value)

    def truth(self, name: str) -> bool | None:
        """Return a field that is true or false, None if it is absent or null."""
        if (value := self.get(name)) not in (None, True, False):
            raise self.refuse(name, "is neither", "true or false")
        return value

    def token(self, name: str, several: bool = False) -> Any:
        """Return the id of a token, or a list of ids where several are allowed; raise for other values."""
        value = self.get(name)
        ids = value if several and isinstance(value, list) else [value]
        if any(i is not None and type(i) is not int for i in ids):
            raise self.refuse(
                name, "must be the id of a token", "a whole number" + (", or a list of them" if several else "")
            )
        return value

    def per_stage(self, name: str, stages: list[tuple], why: str) -> None:
        """Raise unless the field is absent or a list that begins with `stages`: for each stage the allowed values."""
        values = self.get(name)
        if values is None:
            return
        if not isinstance(values, list):
            values = [values] * len(stages)
        if len(values) < len(stages) or any(
            value not in allowed for value, allowed in zip(values, stages, strict=False)
        ):
            raise self.refuse(name, why, str([allowed[0] for allowed in stages[:2]]) + " for each pair of stages")

    def constants(self) -> None:
        for name, values in CONSTANTS.items():
            if name in self.values and self.get(name) not in values and self.values[name] is not None:
                allowed = " or ".join(as_typed(value) for value in values)
                raise self.refuse(name, "this model lacks that part", allowed)

    def rest(self) -> list[str]:
        """Return a note of each field that is left."""
        left = {name: value for name, value in self.values.items() if name not in self.taken}
        return [
            f"{self.where}: the field {name}={value!r} is not known and was not read" for name, value in left.items()
        ]


def read(layout: str, values: dict[str, Any], sizes: dict[str, Any], where: str) -> tuple[Description, list[str]]:
    """Return the description of a model and notes for the user.

    Args:
        layout: of the tensors.
        values: the content of config.json.
        sizes: the model's sizes by the tensors (tables.sizes_of).
        where: the file's name in messages.

    Raises:
        ValueError: a field contradicts the tensors, or states something that this project's model does not have.
    """
    fields = _Fields(values, where)
    fields.constants()
    if (
        layout == "native"
        and _is_legacy(values)
        or layout != "native"
        and "layer_types" in values
        and not _is_legacy(values)
    ):
        raise mistake(
            where,
            problem=f"is not of the layout of the tensors, which is {layout}",
            allowed="config.json and tensors of one layout",
        )
    fields.same("hidden_size", sizes["hidden_size"])
    fields.same("num_experts", sizes["num_experts"])
    fields.same("num_key_value_heads", sizes["num_query_groups"])
    fields.same("head_dim", sizes["kv_channels"])
    if fields.get("vocab_size", sizes["vocab_size"]) != sizes["vocab_size"]:
        raise fields.refuse("vocab_size", "the embedding has another number of rows", str(sizes["vocab_size"]))
    choices = (_native if layout == "native" else _legacy)(fields, sizes)
    notes = choices.pop("notes", [])
    rotated = sizes["kv_channels"] * choices["rotary_percent"]
    if rotated % 2:
        name = "rope_parameters" if "rope_parameters" in values else "partial_rotary_factor"
        problem = f"RoPE would rotate {rotated:g} of {sizes['kv_channels']} channels, and it rotates pairs"
        raise fields.refuse(name, problem, "a share that gives an even number")
    model = Description(
        **(sizes | choices),
        router_norm_epsilon=ROUTER_EPSILON.get(layout),
        max_position_embeddings=fields.whole(
            "max_position_embeddings", fields.get("max_position_embeddings", Description.max_position_embeddings)
        ),
        init_method_std=fields.number("initializer_range", Description.init_method_std),
        bos=fields.token("bos_token_id"),
        eos=fields.token("eos_token_id", several=True),
        pad=fields.token("pad_token_id"),
    )
    return model.simplified(), notes + fields.rest()


def _is_legacy(values: dict[str, Any]) -> bool:
    marks = ("zaya_layers", "cca", "activation_func", "ffn_hidden_size", "moe_router_topk", "norm_epsilon")
    return any(name in values for name in (*marks, "zaya_mlp_expansion", "num_query_groups", "smoe_layers"))


def _native(fields: _Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    layers = sizes["num_layers"]
    fields.same("num_hidden_layers", layers)
    fields.same("num_attention_heads", sizes["num_attention_heads"])
    fields.same("moe_intermediate_size", sizes["moe_ffn_hidden_size"])
    fields.same("router_hidden_size", sizes["router_hidden_size"])
    types = fields.get("layer_types", ["hybrid"] * layers)
    if not isinstance(types, list) or len(types) != layers or any(kind not in ("hybrid", SLIDING) for kind in types):
        raise fields.refuse("layer_types", "is not one type a layer", f"{layers} types, hybrid or {SLIDING}")
    sees = fields.get("sliding_window", False)  # counts the token itself too
    if (sees is not False) != (SLIDING in types) or sees == 1:
        problem = "contradicts layer_types, or a token sees itself alone"
        raise fields.refuse("sliding_window", problem, f"at least 2 with layers {SLIDING}, null without")
    windows = [(fields.whole("sliding_window", sees) - 1) * (kind == SLIDING) if sees else 0 for kind in types]
    for name in ("router_eda", "moe_skip_expert"):
        if not sizes[name]:
            raise mistake("tensors", problem=f"native models always have {name}", allowed="all tensors of the layout")
    rope, notes = fields.get("rope_parameters", {}), []
    if not isinstance(rope, dict) or not isinstance(rope.get("hybrid", {}), dict):
        raise fields.refuse("rope_parameters", "must be an object", "hybrid: {rope_theta: ..., rope_type: default}")
    for name, default in (("rope_theta", 5_000_000), ("partial_rotary_factor", 0.5)):
        if not rope and fields.get(name, default) != default:  # transformers ignores it, vLLM's class does not
            raise fields.refuse(name, "loaders read this place in different ways", "rope_parameters: {hybrid: ...}")
    if not rope:
        notes.append(
            f"{fields.where}: rope_parameters is missing; transformers' defaults, a base of 5,000,000 (10,000 with a "
            "sliding window) and a share of 0.5, are taken"
        )
        rope = {
            "hybrid": {"rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
            SLIDING: {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
        }
    flat = {name: value for name, value in rope.items() if not isinstance(value, dict)}
    if unknown := sorted(set(rope) - set(flat) - {"hybrid", SLIDING}):
        raise fields.refuse("rope_parameters", f"has entries of unknown layer types: {unknown}", "hybrid")
    outer_share = fields.get("partial_rotary_factor")
    if "hybrid" not in rope and outer_share is not None:  # read by vLLM's class alone
        flat = {"partial_rotary_factor": outer_share} | flat
    hybrid = flat | rope.get("hybrid", {})
    if hybrid.get("partial_rotary_factor") is None:  # transformers then takes 1, vLLM's class the outer field
        outer = f"the outer value is {as_typed(outer_share)}"
        problem = f"lacks partial_rotary_factor, for which loaders take different defaults ({outer})"
        raise fields.refuse("rope_parameters", problem, "hybrid: {partial_rotary_factor: ...}")
    if outer_share not in (None, hybrid["partial_rotary_factor"]):
        notes.append(
            f"{fields.where}: partial_rotary_factor={outer_share!r} contradicts rope_parameters, whose "
            f"{hybrid['partial_rotary_factor']!r} is taken, as transformers does"
        )
    base, share = _rope(fields, hybrid)
    choices = _windows(fields, "layer_types", windows)
    if any(windows):
        sliding = rope.get(SLIDING)
        if not isinstance(sliding, dict):
            raise fields.refuse("rope_parameters", f"lacks an object {SLIDING}", f"{SLIDING}: {{rope_theta: ...}}")
        choices["swa_rotary_base"], sliding_share = _rope(fields, sliding)
        if sliding_share != share:
            raise fields.refuse("rope_parameters", "layers with a window rotate another share", as_typed(share))
    return choices | {
        "rotary_base": base,
        "rotary_percent": share,
        "norm_epsilon": fields.number("rms_norm_eps", Description.norm_epsilon, 1),
        "notes": notes,
    }


def _rope(fields: _Fields, entry: dict[str, Any]) -> tuple[int, float]:
    """Return base and share of an entry of rope_parameters."""
    entry = dict(entry)
    if entry.pop("rope_type", None) not in (None, "default"):
        raise fields.refuse("rope_parameters", "RoPE is scaled", "rope_type: default")
    base, share = entry.pop("rope_theta", None), entry.pop("partial_rotary_factor", None)
    if entry or base is None or share is None:
        problem = f"unknown: {sorted(entry)}" if entry else "lacks rope_theta or partial_rotary_factor"
        raise fields.refuse("rope_parameters", problem, "rope_theta, rope_type, partial_rotary_factor")
    return fields.whole("rope_parameters", base), fields.checked("rope_parameters", share, 1)


def _windows(fields: _Fields, name: str, windows: list[int]) -> dict[str, Any]:
    """Return the fields of Description for each layer's window in previous tokens, 0 without one; `name`: the field
    that states them.
    """
    window = max(windows)
    every = windows.index(0) + 1 if 0 in windows else None
    pattern = [window * (every is None or layer % every != 0) for layer in range(1, len(windows) + 1)]
    if windows != pattern:
        allowed = "one window, in all layers or in all but every n-th"
        raise fields.refuse(name, "these layers with a sliding window are not supported", allowed)
    return {"sliding_window": window, "window_attn_skip_freq": every} if window else {}


def _legacy(fields: _Fields, sizes: dict[str, Any]) -> dict[str, Any]:
    get = fields.get
    heads, groups, experts = sizes["num_attention_heads"], sizes["num_query_groups"], sizes["num_experts"]
    pairs, width, notes = sizes["num_layers"], 2 * sizes["moe_ffn_hidden_size"], []

    def per_pair(attention: tuple, moe: tuple) -> list[tuple]:
        return [attention, moe] * pairs

    stale = "zaya_layers" in fields.values or "smoe_layers" in fields.values
    for name in ("zaya_layers", "smoe_layers"):
        fields.per_stage(name, per_pair(("a",), (experts,)), "does not fit the tensors")
    if get("num_hidden_layers", 2 * pairs) != 2 * pairs:
        if not stale:
            raise fields.refuse("num_hidden_layers", "the tensors show another value", str(2 * pairs))
        notes.append(
            f"{fields.where}: num_hidden_layers={get('num_hidden_layers')} is stale; the tensors have {2 * pairs}"
        )
    before, remainder = divmod(sizes["hidden_size"], sizes["kv_channels"])  # heads before compression, as in ZAYA1-base
    fields.same("num_attention_heads", heads, before)
    fields.same("num_query_groups", groups)
    fields.same("kv_channels", sizes["kv_channels"])
    lists = {"cca_num_q_heads": heads, "num_query_groups_list": groups}
    if get("num_attention_heads_list") is not None and not remainder:
        lists["num_attention_heads_list"] = before
    for name, of_attention in lists.items():
        fields.per_stage(name, per_pair((of_attention,), (0, None, of_attention)), "does not fit the tensors")
    fields.per_stage(
        "ffn_hidden_size", per_pair((0, None, width), (width,)), "the fused width of gate and up does not fit"
    )
    fields.per_stage("ffn_hidden_size_list", per_pair((0, None, width), (width,)), "does not fit the tensors")
    for name in ("zaya_mlp_expansion", "smoe_mlp_expansion"):
        of_moe = (sizes["router_hidden_size"],)
        fields.per_stage(name, per_pair((0, None, *of_moe), of_moe), "does not fit the tensors")
    choices, window_base = _legacy_windows(fields, pairs), get("swa_rotary_base")
    if choices:
        choices["swa_rotary_base"] = fields.whole("swa_rotary_base", window_base)
    for name, size in (("use_mod", "moe_skip_expert"), ("use_eda", "router_eda")):
        for family in ("zaya", "smoe"):
            if get(f"{family}_{name}", sizes[size]) != sizes[size] and pairs > (name == "use_eda"):
                raise fields.refuse(f"{family}_{name}", "contradicts the tensors", as_typed(sizes[size]))
    share, base = fields.either("partial_rotary_factor", "rope_pct"), fields.either("rope_theta", "rotary_base")
    epsilon = fields.either("norm_epsilon", "rms_norm_eps")
    for name, value in (("partial_rotary_factor", share), ("rope_theta", base)):
        if value is None:
            raise fields.refuse(name, "is missing, and no tensor shows it", "a number")
    in_fp32 = fields.truth("residual_in_fp32")
    if in_fp32 is None:
        notes.append(f"{fields.where}: residual_in_fp32 is not stated; the recipe decides")
    return choices | {
        "rotary_base": fields.whole("rope_theta", base),
        "rotary_percent": fields.checked("partial_rotary_factor", share, 1),
        "norm_epsilon": fields.checked("norm_epsilon", Description.norm_epsilon if epsilon is None else epsilon, 1),
        "temperature_form": "clamped_exp" if fields.truth("clamp_temp") else "linear",
        "residual_in_fp32": in_fp32,
        "notes": notes,
    }


def _legacy_windows(fields: _Fields, pairs: int) -> dict[str, Any]:
    """Return `_windows` of swa_layers: for each stage the previous tokens that a token sees, 0 for all and in MoE
    stages. sliding_window, where it is stated too, has to be the same number.
    """
    stages = fields.get("swa_layers", [0] * 2 * pairs)
    if not isinstance(stages, list) or len(stages) < 2 * pairs or any(stages[1 : 2 * pairs : 2]):
        raise fields.refuse("swa_layers", "is not a window a stage", f"{2 * pairs} numbers, 0 for every second stage")
    windows = [0 if not value else fields.whole("swa_layers", value) for value in stages[: 2 * pairs : 2]]
    choices = _windows(fields, "swa_layers", windows)
    if fields.get("sliding_window") not in (None, False, max(windows)):
        raise fields.refuse("sliding_window", "contradicts swa_layers", f"null or {max(windows)}")
    return choices


def write(layout: str, model: Description, dtype: str) -> dict[str, Any]:
    """Return the content of config.json. dtype: bfloat16, float16 or float32."""
    common = {
        "architectures": ["ZayaForCausalLM"],
        "model_type": "zaya",
        "dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.num_query_groups,
        "head_dim": model.kv_channels,
        "num_experts": model.num_experts,
        "max_position_embeddings": model.max_position_embeddings,
        "partial_rotary_factor": model.rotary_percent,
        "sliding_window": None,
        "attention_bias": False,
        "lm_head_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_cache": True,
        "pad_token_id": model.pad,
        "bos_token_id": model.bos,
        "eos_token_id": model.eos,
    }
    return common | _WRITE[layout](model)


def _write_native(model: Description) -> dict[str, Any]:
    bases = {"hybrid": model.rotary_base} | ({SLIDING: model.swa_rotary_base} if any(model.windows) else {})
    share = model.rotary_percent
    return {
        "num_hidden_layers": model.num_layers,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": model.moe_ffn_hidden_size,
        "router_hidden_size": model.router_hidden_size,
        "cca_time0": 2,
        "cca_time1": 2,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_epsilon,
        "layer_types": [SLIDING if window else "hybrid" for window in model.windows],
        "sliding_window": model.sliding_window and model.sliding_window + 1,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": float(base), "partial_rotary_factor": share}
            for kind, base in bases.items()
        },
        "initializer_range": model.init_method_std,
        "output_router_logits": False,
    }


def _write_legacy(model: Description) -> dict[str, Any]:
    return {
        "num_hidden_layers": 2 * model.num_layers,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.kv_channels,
        "ffn_hidden_size": 2 * model.moe_ffn_hidden_size,
        "moe_router_topk": 1,
        "zaya_mlp_expansion": model.router_hidden_size,
        "zaya_use_mod": True,
        "zaya_use_eda": True,
        "zaya_high_prec": True,
        "scale_residual_merge": True,
        "residual_in_fp32": model.residual_in_fp32 is not False,
        "cca": True,
        "gated_linear_unit": True,
        "activation_func": "swiglu",
        "normalization": "RMSNorm",
        "norm_epsilon": model.norm_epsilon,
        "add_bias_linear": False,
        "rope_theta": model.rotary_base,
        "rope_scaling": False,
        **(
            {
                "swa_layers": [value for window in model.windows for value in (window, 0)],
                "swa_rotary_base": model.swa_rotary_base,
            }
            if any(model.windows)
            else {}
        ),
        "clamp_temp": False,
        "mamba_cache_dtype": "float32",
        "bias_activation_fusion": True,
        "activation_func_fp8_input_store": False,
    }


def _write_smoe(model: Description) -> dict[str, Any]:
    """Return legacy's fields under the names of Zyphra's SMoEConfig, which derives head_dim from the heads before
    compression and has one entry a stage where legacy has one number.
    """
    heads, rest = divmod(model.hidden_size, model.kv_channels)
    if rest:
        problem = f"is no multiple of model.kv_channels={model.kv_channels}, by which smoe's loaders find the heads"
        raise mistake("model.hidden_size", model.hidden_size, problem=problem, fix="--layout legacy")
    names = {"rope_theta": "rotary_base", "rope_scaling": "use_rope_scaling"}
    values = {names.get(name, name.replace("zaya_", "smoe_")): value for name, value in _write_legacy(model).items()}
    stages = {
        "smoe_layers": ("a", model.num_experts),
        "num_attention_heads_list": (heads, 0),
        "cca_num_q_heads": (model.num_attention_heads, 0),
        "num_query_groups_list": (model.num_query_groups, 0),
        "ffn_hidden_size_list": (0, 2 * model.moe_ffn_hidden_size),
        "smoe_mlp_expansion": (0, model.router_hidden_size),
    }
    return values | {
        "architectures": ["SMoEForCausalLM"],
        "model_type": "smoe",
        "num_attention_heads": heads,
        "rope_pct": model.rotary_percent,
        **{name: list(pair) * model.num_layers for name, pair in stages.items()},
    }


_WRITE: dict[str, Callable[[Description], dict[str, Any]]] = {
    "native": _write_native,
    "legacy": _write_legacy,
    "smoe": _write_smoe,
}
