# SPDX-License-Identifier: Apache-2.0
"""Test sizes near a recipe's and widths of experts: whole tiles, equal parameters, and the bytes that decoding reads."""

from dataclasses import replace

import pytest

from zaya_plugin import cli
from zaya_plugin.config.compose import compose
from zaya_plugin.config.schema import with_values
from zaya_plugin.plan import sizes
from zaya_plugin.plan.flops import count_parameters, forward_flops_by_part
from zaya_plugin.plan.recipe_plan import shape_of


@pytest.fixture(scope="module")
def recipe():
    return compose(["experiment=zaya1_base", "cluster=mi300x_8", "data.path=none", "stage.global_batch_size=128"])


def test_odd_sizes_have_faster_ones_near_them(recipe):
    odd = with_values(recipe, {"model.hidden_size": 1900, "model.moe_ffn_hidden_size": 2000})
    near_of = sizes.faster_sizes(odd, 8)
    assert near_of.keys() == sizes.STEPS.keys()
    for key, gain in (("model.hidden_size", 0.02), ("model.moe_ffn_hidden_size", 0.005)):
        own, *near = near_of[key]
        assert near[0]["value"] % 64 == 0 and near[0]["gain"] > gain and near[0]["tflops"] > (1 + gain) * own["tflops"]
        assert near == sorted(near, key=lambda row: -row["tflops"]) and len(near) <= sizes.SHOWN
    usual = {key: [row["value"] for row in near] for key, (_, *near) in sizes.faster_sizes(recipe, 8).items()}
    assert usual["model.moe_ffn_hidden_size"] == usual["model.make_vocab_size_divisible_by"] == []
    assert usual["model.hidden_size"][0] == 2304  # 9 x 256: whole rounds


def test_wider_experts_train_at_a_higher_rate_and_decode_more_slowly(recipe):
    rows = sizes.widths(recipe, 8)
    assert [(row["width"], row["experts"]) for row in rows] == [(512, 64), (1024, 32), (2048, 16), (4096, 8), (8192, 4)]
    assert [row["tflops"] for row in rows] == sorted(row["tflops"] for row in rows)
    assert [row["decode_1"] for row in rows] == sorted(row["decode_1"] for row in rows)
    assert rows[2]["active"] == 753_608_528
    # one sequence reads the weights that a token uses, the head, and its cache of 40 KiB a token
    moved = 2 * (753_608_528 + 262_272 * 2048) + 4096 * 40 * 1024
    assert rows[2]["decode_1"] == pytest.approx(1e3 * moved / 4.33e12)
    # many sequences read all experts
    shape = shape_of(recipe)
    whole = 2 * sum(count_parameters(shape).values()) + 1000 * 4096 * 40 * 1024
    assert sizes.decode_seconds(shape, 1000, 6e14, 4.33e12) == pytest.approx(whole / 4.33e12)
    # of layers with a window, a token behind 4,096 others reads all of them, and behind 8,192 half of them
    windows = replace(shape, sliding_window=4096, window_attn_skip_freq=2)
    assert [windows.cached_tokens(n) for n in (100, 4096, 8192)] == [40 * 100, 40 * 4096, 20 * 8192 + 20 * 4096]
    others = forward_flops_by_part(shape, 4096)
    for context, keys in ((4096, 40 * 4096), (8192, 20 * 4096 + 20 * 8192)):
        operations = sum(others.values()) - others["attention"] + 4 * 8 * 128 * keys
        assert sizes.decode_seconds(windows, 1, 1.0, 1e30, context) == pytest.approx(operations)
    lines = sizes.percentages(rows, 2048)
    assert all(values[2] == pytest.approx(100) for values in lines.values()) and len(lines) == 4


def test_the_command_prints_and_draws(capsys, tmp_path):
    picture = tmp_path / "widths.png"
    words = ["experiment=zaya1_base", "cluster=h200_8", "stage.global_batch_size=128"]
    assert cli.main(["plan", "sizes", *words, f"--picture={picture}"]) == 0
    printed = capsys.readouterr().out
    assert "none near it is faster" in printed and "decode ms, batch 64" in printed
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert cli.main(["plan", "sizes", *words[:1], "cluster=mi300x_8"]) == 0
    assert "-9.2 %" in capsys.readouterr().out
    for name, complaint in (
        ("x.doc", "another ending. Allowed: .png. Fix: --picture x.png"),
        ("no/x.png", "its folder does not exist"),
    ):
        assert cli.main(["plan", "sizes", *words, f"--picture={name}"]) == 2
        told = capsys.readouterr()
        assert complaint in told.err and not told.out
    assert cli.main(["plan", "sizes", "experiment=cpu_demo"]) == 2
    assert "machine.name=null: is not a device whose tiles are known" in capsys.readouterr().err
