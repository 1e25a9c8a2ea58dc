# SPDX-License-Identifier: Apache-2.0
"""config.json: the releases' files, every constant, and fields that contradict the tensors."""

import json
from dataclasses import replace
from math import prod

import pytest

from tests.checkpoint.convert.published import TINY
from zaya_plugin.checkpoint.convert import hf_config
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.tables import WRITTEN, rows, sizes_of
from zaya_plugin.config.compose import compose

BASE = Description(40, 2048, 8, 2, 128, 16, 2048, 256, 262_272)

# As on the Hub, with the stray keys.
NATIVE_8B = {
    "architectures": ["ZayaForCausalLM"],
    "model_type": "zaya",
    "dtype": "bfloat16",
    "vocab_size": 262272,
    "hidden_size": 2048,
    "num_hidden_layers": 40,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 16,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 2048,
    "router_hidden_size": 256,
    "cca_time0": 2,
    "cca_time1": 2,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 131072,
    "layer_types": ["hybrid"] * 40,
    "sliding_window": None,
    "rope_parameters": {
        "hybrid": {"rope_type": "default", "rope_theta": 5000000, "partial_rotary_factor": 0.5},
        "hybrid_sliding": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "rope_type": "default",
    },
    "partial_rotary_factor": 0.5,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "lm_head_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "output_router_logits": False,
    "use_cache": True,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 106,
}
# ZAYA1-base's: lists by stage, the heads before compression, a number of layers that is stale.
LEGACY_BASE = {
    "architectures": ["ZayaForCausalLM"],
    "model_type": "zaya",
    "zaya_layers": ["a", 16] * 40,
    "num_hidden_layers": 120,
    "num_attention_heads": 16,
    "cca_num_q_heads": [8, 0] * 40,
    "num_query_groups_list": [2, 0] * 40,
    "num_key_value_heads": 2,
    "kv_channels": 128,
    "hidden_size": 2048,
    "ffn_hidden_size_list": [0, 4096] * 40,
    "moe_router_topk": 1,
    "zaya_mlp_expansion": [0, 256] * 40,
    "zaya_use_mod": True,
    "zaya_use_eda": True,
    "zaya_high_prec": True,
    "scale_residual_merge": True,
    "cca": True,
    "gated_linear_unit": True,
    "activation_func": "swiglu",
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-05,
    "add_bias_linear": False,
    "attention_bias": False,
    "lm_head_bias": False,
    "attention_dropout": 0.0,
    "rope_theta": 1000000,
    "partial_rotary_factor": 0.5,
    "rope_scaling": False,
    "sliding_window": None,
    "mamba_cache_dtype": "float32",
    "activation_func_fp8_input_store": False,
    "max_position_embeddings": 32768,
    "vocab_size": 262272,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "tie_word_embeddings": True,
}


def read(layout, values, model=BASE):
    sizes = sizes_of(layout, {row.name: row.shape for row in rows(layout, model)})
    return hf_config.read(layout, json.loads(json.dumps(values)), sizes, "config.json")


def test_zaya1_8b_is_read():
    model, notes = read("native", NATIVE_8B)
    wanted = replace(BASE, rotary_base=5_000_000, max_position_embeddings=131_072, bos=2, eos=106, pad=0)
    assert model == wanted and notes == []
    assert set(NATIVE_8B) <= set(hf_config.write("native", model, "bfloat16"))


def test_zaya1_base_is_read_in_spite_of_its_stale_fields():
    model, (stale, unstated) = read("legacy", LEGACY_BASE)
    assert model == replace(
        BASE, rotary_base=1_000_000, max_position_embeddings=32_768, residual_in_fp32=None, bos=2, eos=1, pad=0
    )
    assert "num_hidden_layers=120 is stale" in stale and "residual_in_fp32 is not stated" in unstated


def test_the_class_defaults_of_smoe_are_read():
    values = {
        "model_type": "smoe",
        "smoe_layers": ["a", 16] * 40 + ["a", 16] * 20,  # longer than the model
        "smoe_mlp_expansion": [0, 256] * 80,
        "smoe_use_mod": True,
        "smoe_use_eda": True,
        "smoe_high_prec": True,
        "rotary_base": 1000000,
        "rope_pct": 0.5,
        "use_rope_scaling": False,
        "swa_layers": [0] * 160,
        "swa_rotary_base": 10000,
        "norm_epsilon": 1e-05,
        "num_hidden_layers": 120,
        "clamp_temp": True,
    }
    model, notes = read("smoe", values)
    assert (model.rotary_base, model.rotary_percent, model.temperature_form) == (1_000_000, 0.5, "clamped_exp")
    assert (model.norm_epsilon, model.router_norm_epsilon) == (1e-5, 1e-6)
    assert len(notes) == 2


EPSILON = {"native": [], "legacy": [], "smoe": ["router_norm_epsilon"]}  # what loaders of a layout decide
WINDOWS = replace(TINY, sliding_window=4096, window_attn_skip_freq=2, rotary_base=5_000_000)
ROPE = {"hybrid": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}}


def test_the_window_of_each_layout_counts_other_tokens():
    """Native counts the token itself too, legacy and smoe the previous ones; transformers reads what is written."""
    native = hf_config.write("native", WINDOWS, "bfloat16")
    assert (native["sliding_window"], native["layer_types"]) == (4097, ["hybrid_sliding", "hybrid"])
    bases = {kind: entry["rope_theta"] for kind, entry in native["rope_parameters"].items()}
    assert bases == {"hybrid": 5e6, "hybrid_sliding": 1e4}
    legacy = hf_config.write("legacy", WINDOWS, "bfloat16")
    assert (legacy["swa_layers"], legacy["swa_rotary_base"]) == ([4096, 0, 0, 0], 10_000)
    smoe = {"smoe_layers": ["a", 12] * 2, "swa_layers": [4096, 0, 0, 0, 7], "swa_rotary_base": 10_000}
    smoe |= {"rotary_base": 5_000_000, "rope_pct": 0.5, "sliding_window": 4096}
    for layout, values in (("native", native), ("legacy", legacy), ("smoe", smoe)):
        model, _ = read(layout, values, WINDOWS)
        assert model.windows == [4096, 0] and model.differing(WINDOWS) == EPSILON[layout], layout
        assert (model.swa_rotary_base, model.rotary_base) == (10_000, 5_000_000)
    every = replace(WINDOWS, window_attn_skip_freq=None, swa_rotary_base=500)
    for layout in ("native", "legacy"):
        assert read(layout, hf_config.write(layout, every, "bfloat16"), TINY)[0].differing(every) == []
    theirs = pytest.importorskip("transformers.models.zaya").ZayaConfig(**native)
    assert theirs.sliding_window == 4097 and theirs.rope_parameters["hybrid_sliding"]["rope_theta"] == 1e4


@pytest.mark.parametrize(
    ("layout", "change", "message"),
    [
        ("native", {"layer_types": ["hybrid", "hybrid_sliding"]}, "layer_types=.* these layers .* not supported"),
        ("native", {"sliding_window": None}, "sliding_window=null: contradicts layer_types"),
        ("native", {"sliding_window": 1}, "sliding_window=1: .* sees itself alone"),
        ("native", {"rope_parameters": ROPE}, "rope_parameters=.* lacks an object hybrid_sliding"),
        (
            "native",
            {"rope_parameters": ROPE | {"hybrid_sliding": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}}},
            "rope_parameters=.* rotate another share",
        ),
        ("legacy", {"swa_rotary_base": None}, "swa_rotary_base=null: "),
        ("legacy", {"sliding_window": 4097}, "sliding_window=4097: contradicts swa_layers"),
    ],
)
def test_windows_that_contradict_themselves_are_refused(layout, change, message):
    with pytest.raises(ValueError, match=f"^config.json: {message}"):
        read(layout, hf_config.write(layout, WINDOWS, "bfloat16") | change, WINDOWS)


def test_zaya1_74b_is_the_released_model():
    """Counts of tensors and parameters on shapes alone; 4,683 tensors of legacy and smoe become 1,923."""
    recipe = compose(["experiment=zaya1_base", "model=zaya1_74b", "stage.rotary_base=5000000", "data.path=x"])
    model = Description.of_recipe(recipe, 262_272)
    assert model.windows == [4096, 0] * 30
    counts, numbers = {}, set()
    for layout in ("native", "legacy", "smoe"):
        named = {row.name: row.shape for row in rows(layout, model)}
        biases = sum(prod(shape) for name, shape in named.items() if name.endswith("balancing_biases"))
        counts[layout] = len(named)
        numbers.add((sum(map(prod, named.values())) - biases, biases))
        back, notes = read(layout, hf_config.write(layout, model, "bfloat16"), model)
        assert back.differing(model) == EPSILON[layout] and notes == []
    assert counts == {"native": 1923, "legacy": 4683, "smoe": 4683}
    assert numbers == {(74_793_953_144, 1500)}


@pytest.mark.parametrize("layout", WRITTEN)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_layers": 1, "num_experts": 1, "rotary_percent": 0.25, "norm_epsilon": 3e-6, "rotary_base": 777},
        {"num_query_groups": 4, "num_attention_heads": 12, "init_method_std": 0.1, "eos": [1, 106]},
    ],
)
def test_written_and_read_back(layout, changes):
    model = replace(TINY, **changes)
    back, notes = read(layout, hf_config.write(layout, model, "bfloat16"), model)
    as_read = {"router_norm_epsilon": 1e-6 if layout == "smoe" else None}
    as_read |= {} if layout == "native" else {"init_method_std": 0.02}
    assert back == replace(model, **as_read) and notes == []


def test_the_heads_before_compression_are_compared_where_the_width_has_whole_heads():
    for width, refused in ((16, True), (20, False)):  # of 8 channels: 2 heads; 2.5
        model = replace(TINY, hidden_size=width)
        values = hf_config.write("legacy", model, "bfloat16") | {"num_attention_heads_list": [3, 0, 3, 0]}
        if refused:
            with pytest.raises(ValueError, match="num_attention_heads_list=.*: does not fit the tensors"):
                read("legacy", values, model)
        else:
            assert read("legacy", values, model)[1] == []


@pytest.mark.parametrize(
    ("layout", "field", "value"),
    [
        ("native", "sliding_window", 4097),
        ("native", "layer_types", ["hybrid", "sliding_attention"]),
        ("native", "layer_types", ["hybrid"]),
        ("native", "cca_time0", 4),
        ("native", "attention_bias", True),
        ("native", "lm_head_bias", True),
        ("native", "tie_word_embeddings", False),
        ("native", "hidden_act", "gelu"),
        ("native", "num_experts_per_tok", 2),
        ("native", "attention_dropout", 0.1),
        ("native", "quantization_config", {"format": "float-quantized"}),
        ("native", "num_hidden_layers", 3),
        ("native", "num_attention_heads", 8),
        ("native", "num_key_value_heads", 1),
        ("native", "head_dim", 16),
        ("native", "vocab_size", 128),
        ("native", "num_experts", 16),
        ("native", "moe_intermediate_size", 16),
        ("native", "router_hidden_size", 16),
        ("native", "rope_parameters", {"hybrid": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4}}),
        ("native", "rope_parameters", {"hybrid": {"rope_theta": 1e4, "factor": 4}}),
        ("native", "rope_parameters", {"hybrid": {"rope_theta": 1e4 + 0.5}}),
        ("native", "rope_parameters", {"hybrid": {"rope_type": "default"}}),
        ("native", "rope_parameters", {"full_attention": {"rope_theta": 1e4}}),
        ("native", "rope_parameters", {"hybrid": {"rope_theta": "1e4"}}),
        ("native", "rope_parameters", {"hybrid": {"rope_theta": float("inf")}}),
        ("native", "rope_parameters", {"hybrid": {"rope_theta": 1e4, "partial_rotary_factor": 2}}),
        ("native", "rope_parameters", {"hybrid": {"rope_theta": 1e4, "partial_rotary_factor": 0.4}}),  # 3.2 channels
        ("native", "rope_parameters", {"hybrid": {"rope_theta": 1e300, "partial_rotary_factor": 0.5}}),
        ("native", "rope_parameters", {"hybrid": {"rope_theta": 1e4}}),
        ("native", "rms_norm_eps", 1e300),
        ("native", "max_position_embeddings", 1e30),
        ("native", "rope_parameters", {"hybrid": None}),
        ("native", "rope_parameters", [1]),
        ("native", "rms_norm_eps", "1e-5"),
        ("native", "rms_norm_eps", 0),
        ("native", "max_position_embeddings", -5),
        ("native", "initializer_range", "x"),
        ("native", "bos_token_id", [2]),
        ("native", "eos_token_id", [1, "2"]),
        ("legacy", "clamp_temp", "no"),
        ("legacy", "residual_in_fp32", "yes"),
        ("legacy", "partial_rotary_factor", "half"),
        ("legacy", "rope_theta", [1]),
        ("legacy", "norm_epsilon", -1),
        ("legacy", "zaya_layers", ["a", 16, "a", 16]),
        ("legacy", "swa_layers", [0, 4096, 0, 0]),
        ("legacy", "swa_layers", [0, 0, 4096, 0]),
        ("legacy", "swa_layers", [4096, 0, 128, 0]),
        ("legacy", "swa_layers", [True, 0, 0, 0]),
        ("legacy", "swa_layers", [4096, 0]),
        ("legacy", "sliding_window", 4096),
        ("legacy", "zaya_use_eda", False),
        ("legacy", "zaya_use_mod", False),
        ("legacy", "scale_residual_merge", False),
        ("legacy", "rope_scaling", {"type": "linear"}),
        ("legacy", "activation_func", "gelu"),
        ("legacy", "normalization", "LayerNorm"),
        ("legacy", "ffn_hidden_size", 8),
        ("legacy", "num_hidden_layers", 2),
        ("legacy", "num_attention_heads", 3),
        ("legacy", "zaya_mlp_expansion", [0, 256]),
        ("legacy", "add_bias_linear", True),
        ("legacy", "cca", False),
        ("legacy", "rope_theta", None),
        ("legacy", "partial_rotary_factor", None),
    ],
)
def test_what_is_not_this_model_is_refused_with_its_field(layout, field, value):
    values = hf_config.write(layout, TINY, "bfloat16") | {field: value}
    with pytest.raises(ValueError, match=f"^config.json: {field}="):
        read(layout, values, TINY)


def test_a_base_that_loaders_read_differently_is_refused():
    values = hf_config.write("native", TINY, "bfloat16") | {"rope_theta": 1e6}
    assert any("rope_theta=1000000.0" in note for note in read("native", values, TINY)[1])
    del values["rope_parameters"]  # transformers then takes 5,000,000
    with pytest.raises(ValueError, match=r"^config.json: rope_theta=1000000.0"):
        read("native", values, TINY)


def test_a_share_outside_of_rope_parameters_is_what_transformers_takes():
    transformers = pytest.importorskip("transformers")
    values = hf_config.write("native", TINY, "bfloat16") | {"partial_rotary_factor": 0.25}
    model, (note,) = read("native", values, TINY)
    assert model.rotary_percent == 0.5
    assert "partial_rotary_factor=0.25 contradicts rope_parameters, whose 0.5 is taken" in note
    assert transformers.ZayaConfig(**values).rope_parameters["hybrid"]["partial_rotary_factor"] == 0.5
    del values["rope_parameters"]["hybrid"]["partial_rotary_factor"]  # transformers then takes 1, vLLM's class 0.25
    with pytest.raises(ValueError, match=r"^config.json: rope_parameters=.*\(the outer value is 0.25\)"):
        read("native", values, TINY)
    del values["rope_parameters"]  # transformers then takes 0.5
    with pytest.raises(
        ValueError, match=r"^config.json: partial_rotary_factor=0.25: loaders read this place in different ways"
    ):
        read("native", values, TINY)
    model, (note,) = read("native", values | {"partial_rotary_factor": 0.5}, TINY)
    assert model.rotary_percent == 0.5 and "a share of 0.5" in note


@pytest.mark.parametrize(
    ("field", "other", "value"),
    [("partial_rotary_factor", "rope_pct", 1), ("rope_theta", "rotary_base", 7), ("norm_epsilon", "rms_norm_eps", 1)],
)
def test_legacy_fields_that_contradict_each_other_are_refused(field, other, value):
    values = hf_config.write("legacy", TINY, "bfloat16") | {other: value}
    with pytest.raises(ValueError, match=f"^config.json: {field}=.*contradicts {other}={value}"):
        read("legacy", values, TINY)
    assert read("legacy", values | {field: value}, TINY)[1] == []


def test_config_and_tensors_are_of_one_layout():
    for layout, other in (("native", "legacy"), ("legacy", "native")):
        with pytest.raises(ValueError, match=f"layout of the tensors, which is {layout}"):
            read(layout, hf_config.write(other, TINY, "bfloat16"), TINY)


def test_unknown_fields_are_named():
    _, notes = read("native", hf_config.write("native", TINY, "bfloat16") | {"query_clip": 3.0}, TINY)
    assert notes == ["config.json: the field query_clip=3.0 is not known and was not read"]


def test_transformers_reads_what_is_written():
    transformers = pytest.importorskip("transformers")
    written = hf_config.write("native", TINY, "bfloat16")
    config = transformers.ZayaConfig(**written)
    rope = config.rope_parameters["hybrid"]
    assert (rope["rope_theta"], rope["partial_rotary_factor"]) == (1e6, 0.5)
    for name in written:
        if name not in ("rope_parameters", "dtype"):
            assert getattr(config, name) == written[name], name
