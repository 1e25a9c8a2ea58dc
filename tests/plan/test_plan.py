# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.plan.shapes import ZAYA1_BASE
from zaya_plugin.plan.flops import count_parameters, forward_flops_by_part, training_flops


def test_parameters_of_zaya1_base_are_the_published_ones():
    parts = count_parameters(ZAYA1_BASE)
    assert sum(parts.values()) == 8_840_488_784  # total of the released safetensors header
    assert sum(parts.values()) - parts["embedding"] == 8_303_355_728
    active = sum(parts.values()) - parts["embedding"] - parts["experts"] * 15 // 16
    assert active == 753_608_528


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
