# SPDX-License-Identifier: Apache-2.0
"""What the model prepares for the CCA prologue; the prologue itself is tested in tests/hip_ops/test_cca_prologue.py."""

import pytest
import torch

from zaya_plugin.model.attention import LocalHeads, key_scale, rope_table


def test_temperature_forms():
    t = torch.tensor([-1.0, 0.5, 3.0])
    assert torch.equal(key_scale(t, "linear"), t)
    assert torch.equal(key_scale(t, "exp"), t.exp())
    assert torch.equal(key_scale(t, "clamped_exp"), torch.tensor([1e-7, 0.5, 2.0]).exp())
    assert (
        key_scale(t.bfloat16(), "exp").dtype == torch.float32
        and key_scale(t.bfloat16(), "linear").dtype == torch.bfloat16
    )


@pytest.mark.parametrize("form", ["linear", "exp", "clamped_exp"])
def test_gradient_of_the_temperature(form):
    t = torch.tensor([0.7, 1.3], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t: key_scale(t, form), t)


def test_layers_share_one_table_of_angles():
    angles = torch.rand(5, 1, 1, 4)
    table = rope_table(angles)
    assert rope_table(angles) is table and rope_table(angles.clone()) is not table
    torch.testing.assert_close(table, torch.cat((angles[..., 0, :2].cos(), angles[..., 0, :2].sin()), -1))


@pytest.mark.parametrize("ranks, groups", [(1, 2), (2, 2), (2, 4), (4, 4), (1, 1)])
def test_delayed_channels_of_a_rank_are_those_of_its_weights(ranks, groups):
    half = torch.zeros(groups * 8 // 2, 3)
    for rank in range(ranks):
        local = LocalHeads(rank, ranks, 8, groups, 8)
        assert local.delayed_channels == len(local.of_values(half, half)[1])
