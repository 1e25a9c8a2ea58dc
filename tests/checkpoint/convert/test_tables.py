# SPDX-License-Identifier: Apache-2.0
"""Names, counts and shapes of the layouts: the sheet's figures, and names that were read in the loaders' sources."""

from dataclasses import replace
from math import prod

import pytest

from tests.checkpoint.convert.published import TINY
from zaya_plugin.checkpoint.convert.description import Description
from zaya_plugin.checkpoint.convert.tables import LAYOUTS, check_cover, check_once, recognise, rows, sizes_of

BASE = Description(40, 2048, 8, 2, 128, 16, 2048, 256, 262_272)
PREVIEW = Description(60, 4096, 16, 2, 128, 24, 4096, 256, 262_272)


def shapes(layout, model):
    return {row.name: row.shape for row in rows(layout, model)}


@pytest.mark.parametrize(
    ("layout", "base", "preview"), [("native", 1283, 1923), ("legacy", 2483, 4683), ("smoe", 2483, 4683)]
)
def test_counts_are_those_of_the_releases(layout, base, preview):
    assert len(shapes(layout, BASE)) == base and len(shapes(layout, PREVIEW)) == preview


@pytest.mark.parametrize("layout", LAYOUTS)
def test_parameters_are_those_of_the_releases(layout):
    biases = 17 * 40
    assert sum(map(prod, shapes(layout, BASE).values())) - biases == 8_840_488_784
    assert sum(map(prod, shapes(layout, PREVIEW).values())) - 25 * 60 == 74_793_953_144


def test_names_of_the_legacy_files():
    found = shapes("legacy", BASE)
    for name, shape in {
        "model.layers.0.res_scale.hidden_states_scale": (2048,),
        "model.layers.0.self_attn.qkv.val_proj2.weight": (128, 2048),
        "model.layers.78.self_attn.qkv.conv_qk.1.weight": (1280, 128, 2),
        "model.layers.1.res_scale.residual_bias": (2048,),
        "model.layers.2.res_scale.hidden_states_bias": (2048,),
        "model.layers.3.zaya_block.router.router_states_scale": (256,),
        "model.layers.79.zaya_block.router.router_mlp.4.weight": (17, 256),
        "model.layers.79.zaya_block.experts.local_experts.15.linear_fc1.weight": (4096, 2048),
        "model.res_scale.residual_scale": (2048,),
        "model.final_norm.weight": (2048,),
    }.items():
        assert found[name] == shape
    assert "model.layers.1.zaya_block.router.router_states_scale" not in found
    assert "model.layers.0.res_scale.residual_scale" not in found and "lm_head.weight" not in found


def test_ownership_of_merges_moves_by_one_stage():
    ours = {row.name: row.ours[0] for row in rows("legacy", TINY)}
    assert ours["model.layers.0.res_scale.hidden_states_bias"] == "decoder.layers.0.input_affine.bias"
    assert ours["model.layers.1.res_scale.hidden_states_bias"] == "decoder.layers.0.post_attention_residual.output_bias"
    assert ours["model.layers.2.res_scale.residual_scale"] == "decoder.layers.0.post_mlp_residual.residual_scale"
    assert ours["model.res_scale.residual_scale"] == "decoder.layers.1.post_mlp_residual.residual_scale"


def test_experts_are_stacked_in_numeric_order():
    (row,) = [row for row in rows("native", TINY) if row.name == "model.layers.1.mlp.experts.gate_up_proj"]
    assert row.shape == (12, 16, 16) and row.part == (16, 16)
    assert row.ours == tuple(f"decoder.layers.1.mlp.experts.linear_fc1.weight{e}" for e in range(12))


def test_one_expert_keeps_its_dimension():
    one = replace(TINY, num_experts=1)
    (row,) = [row for row in rows("native", one) if row.name == "model.layers.0.mlp.experts.down_proj"]
    assert row.shape == (1, 16, 8) and row.stacked and len(row.ours) == 1


def test_names_of_the_primus_port():
    found = shapes("primus", TINY)
    for name in (
        "embedding.word_embeddings.weight",
        "decoder.layers.0.self_attn.linear_q.weight",
        "decoder.layers.0.self_attn.conv_qk.1.bias",
        "decoder.layers.1.zaya_block.local_experts.11.linear_fc2.weight",
        "decoder.res_scale.hidden_states_scale",
        "decoder.final_norm.weight",
    ):
        assert name in found


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("changes", [{}, {"num_layers": 1}, {"num_experts": 1}, {"hidden_size": 7, "kv_channels": 2}])
def test_recognised_with_all_sizes_by_names_and_shapes(layout, changes):
    model = replace(TINY, **changes)
    found = shapes(layout, model)
    assert recognise(found) == layout
    sizes = sizes_of(layout, found)
    assert sizes == {name: getattr(model, name) for name in sizes} and len(sizes) == 11
    assert [row.name for row in check_cover(layout, model, found)] == list(found)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("model.layers.0.mlp.experts.gate_up_proj.weight_scale", "quantised"),
        ("model.vision_tower.x.weight", "vision tower"),
        ("blk.0.attn_q.weight", "GGUF"),
        ("model.layers.0.attn.lora_A.weight", "adapter"),
    ],
)
def test_other_files_are_refused_by_name(name, reason):
    with pytest.raises(ValueError, match=reason) as error:
        recognise([*shapes("native", TINY), name])
    assert str(error.value).startswith(name)
    with pytest.raises(ValueError, match="of no layout"):
        recognise(["model.layers.0.self_attn.q_proj.weight"])


def test_every_problem_of_a_cover_is_named():
    found = shapes("native", TINY)
    del found["model.norm.weight"]
    found["model.layers.1.mlp.gate.extra"] = (1,)
    found["model.embed_tokens.weight"] = (63, 16)
    with pytest.raises(ValueError, match=r"model\.norm\.weight is missing") as error:
        check_cover("native", TINY, found)
    assert "model.layers.1.mlp.gate.extra is unknown" in str(error.value)
    assert "model.embed_tokens.weight has the shape [63, 16], and the model requires [64, 16]" in str(error.value)
    with pytest.raises(ValueError, match="a: 1 tensors are in more than one file"):
        check_once(["a", "b", "a"])
