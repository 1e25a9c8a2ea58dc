# SPDX-License-Identifier: Apache-2.0
"""The model with hip_ops' CCA prologue and without: the same training."""

import pytest
import torch

import hip_ops
from tests.model.test_fused_residual_norm import train
from zaya_plugin.parallel.local_heads import LocalHeads
from zaya_plugin.parallel.packed_documents import PackedDocuments


@pytest.mark.parametrize("form", ["linear", "exp", "clamped_exp"])
def test_fp32_gives_the_same_losses(make_model, batch, form):
    plain, plain_gradients = train(make_model(temperature_form=form), batch, 4, 0.05)
    fused, fused_gradients = train(make_model(temperature_form=form, fused_cca_prologue=True), batch, 4, 0.05)
    torch.testing.assert_close(plain, fused, rtol=1e-6, atol=0.0)
    assert plain_gradients.keys() == fused_gradients.keys()
    for name, gradient in plain_gradients.items():
        assert (gradient - fused_gradients[name]).norm() <= 2e-5 * gradient.norm() + 1e-8, name
    assert plain[-1] < plain[0]


def test_bf16_stays_within_its_noise(make_model, batch):
    options = dict(params_dtype=torch.bfloat16, bf16=True)
    plain, plain_gradients = train(make_model(**options), batch, 4, 0.05)
    fused, fused_gradients = train(make_model(fused_cca_prologue=True, **options), batch, 4, 0.05)
    torch.testing.assert_close(plain, fused, rtol=2e-3, atol=2e-3)
    for name in (
        "decoder.layers.1.self_attention.conv_qk_grouped.weight",
        "decoder.layers.1.self_attention.linear_q.weight",
    ):
        a, b = plain_gradients[name].double(), fused_gradients[name].double()
        assert (a - b).norm() < 0.1 * a.norm()


def test_the_switch_reaches_the_operator(make_model, batch, monkeypatch):
    calls = []
    original = hip_ops.cca_prologue
    monkeypatch.setattr(hip_ops, "cca_prologue", lambda *a, **k: calls.append(a[6]) or original(*a, **k))
    train(make_model(fused_cca_prologue=True), batch, 1, 0.05)
    assert len(calls) == 4  # once a layer
    assert all(rope is calls[0] for rope in calls), "the layers share one table"
    calls.clear()
    train(make_model(), batch, 1, 0.05)
    assert not calls


@pytest.mark.parametrize(
    "options",
    [
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        dict(recompute_granularity="selective", recompute_modules=["core_attn"]),
    ],
    ids=["full", "core"],
)
def test_recomputation_with_the_operator_changes_nothing(make_model, batch, options):
    plain, _ = train(make_model(fused_cca_prologue=True), batch, 2, 0.05)
    again, _ = train(make_model(fused_cca_prologue=True, **options), batch, 2, 0.05)
    assert torch.equal(plain, again)


@pytest.mark.parametrize("ranks, groups", [(1, 2), (2, 2), (2, 4), (4, 4), (1, 1)])
def test_delayed_channels_of_a_rank_are_those_of_its_weights(ranks, groups):
    half = torch.zeros(groups * 8 // 2, 3)
    for rank in range(ranks):
        local = LocalHeads(rank, ranks, 8, groups, 8)
        assert local.delayed_channels == len(local.of_values(half, half)[1])


@pytest.mark.parametrize("reset", [False, True], ids=["running_positions", "restarted_positions"])
def test_packed_documents(make_model, reset):
    """Documents of one, two and more tokens: the same logits as the model's own path."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, 64, (2, 24), generator=generator)
    tokens[0, [0, 2, 9]] = tokens[1, [5, 6, 23]] = 0
    positions = torch.arange(24).expand(2, -1)
    packed = PackedDocuments.from_tokens(tokens, 0, reset_positions=reset)
    found = [
        make_model(fused_cca_prologue=fused).eval()(tokens, positions, None, packed_seq_params=packed)
        for fused in (False, True)
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=2e-6)
