# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest

from tests.plan.shapes import ZAYA1_BASE
from zaya_plugin.config.compose import compose
from zaya_plugin.plan import recipe_plan
from zaya_plugin.plan.flops import active_parameters, count_parameters, forward_flops_by_part, training_flops


def test_parameters_of_zaya1_base_are_the_published_ones():
    parts = count_parameters(ZAYA1_BASE)
    assert sum(parts.values()) == 8_840_488_784  # total of the released safetensors header
    assert sum(parts.values()) - parts["embedding"] == 8_303_355_728
    active = sum(parts.values()) - parts["embedding"] - parts["experts"] * 15 // 16
    assert active == 753_608_528


def test_zaya1_74b_has_the_published_parameters_and_windows():
    shape = recipe_plan.shape_of(compose(["experiment=zaya1_74b", "data.path=x"]), 262_147)
    parts = count_parameters(shape)
    assert sum(parts.values()) == 74_793_953_144
    assert sum(parts.values()) - parts["embedding"] == 73_719_687_032
    assert active_parameters(shape) == 4_262_012_792
    whole = replace(shape, sliding_window=None, window_attn_skip_freq=None)
    # keys that the tokens see, counted: 30 layers with windows of 4,096 previous tokens, 30 without
    seen = sum(min(t, 4096) + 0.5 for t in range(32768)) + sum(t + 0.5 for t in range(32768))
    assert shape.seen_tokens(32768) == pytest.approx(30 * seen / 32768, rel=1e-4)
    assert whole.seen_tokens(32768) == 60 * 16384 and shape.seen_tokens(4096) == whole.seen_tokens(4096)
    windowed, full = (forward_flops_by_part(each, 32768) for each in (shape, whole))
    assert windowed["attention"] / full["attention"] == pytest.approx((16384 + 3840) / 2 / 16384)
    assert {part for part in full if windowed[part] != full[part]} == {"attention"}


@pytest.mark.parametrize("seq_length, gflop", [(4096, 2.915), (32768, 5.26), (131072, 13.3)])
def test_forward_operations(seq_length, gflop):
    parts = forward_flops_by_part(ZAYA1_BASE, seq_length)
    assert sum(parts.values()) / 1e9 == pytest.approx(gflop, rel=2e-3)
    assert training_flops(ZAYA1_BASE, 10, seq_length) == pytest.approx(30 * sum(parts.values()))


def test_operations_agree_with_a_count_of_the_matrices():
    """Operations are twice the weights that a token multiplies with; the two counts share no code."""
    parts = count_parameters(ZAYA1_BASE)
    vectors = 40 * (2 * 1280 + 2) + 40 * 256 * 4 + 39 * 256  # conv biases, temperatures, router biases, norm, gamma
    linear = parts["attention"] + parts["router"] - vectors + parts["experts"] // 16
    operations = forward_flops_by_part(ZAYA1_BASE, 4096)
    assert sum(operations.values()) - operations["attention"] - operations["head"] == pytest.approx(
        2 * linear, rel=1e-6
    )
