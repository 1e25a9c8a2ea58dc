# SPDX-License-Identifier: Apache-2.0
"""The model with hip_ops' residual merge + RMSNorm and without: the same training."""

import pytest
import torch


def train(model, batch, steps, lr):
    """Losses of a few steps of plain gradient descent, and the last gradients."""
    losses = []
    for _ in range(steps):
        ids, positions, labels = batch()
        model.zero_grad(set_to_none=True)
        loss = model(ids, positions, None, labels=labels).float().mean()
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(lr * p.grad)
    return torch.stack(losses), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_fp32_gives_the_same_bits(make_model, batch):
    plain, plain_gradients = train(make_model(), batch, 4, 0.05)
    fused, fused_gradients = train(make_model(fused_residual_norm=True), batch, 4, 0.05)
    assert torch.equal(plain, fused)
    assert plain_gradients.keys() == fused_gradients.keys()
    for name, gradient in plain_gradients.items():
        assert torch.equal(gradient, fused_gradients[name]), name
    assert plain[-1] < plain[0]


def test_bf16_stays_within_its_noise(make_model, batch):
    options = dict(params_dtype=torch.bfloat16, bf16=True)
    plain, plain_gradients = train(make_model(**options), batch, 4, 0.05)
    fused, fused_gradients = train(make_model(fused_residual_norm=True, **options), batch, 4, 0.05)
    torch.testing.assert_close(plain, fused, rtol=2e-3, atol=2e-3)
    for name in ("decoder.layers.1.post_attention_residual.output_scale", "decoder.layers.1.pre_mlp_layernorm.weight"):
        a, b = plain_gradients[name].double(), fused_gradients[name].double()
        assert (a - b).norm() < 0.1 * a.norm()


def test_the_switch_reaches_the_operator(make_model, batch, monkeypatch):
    import hip_ops

    calls = []
    original = hip_ops.scaled_residual_rms_norm
    monkeypatch.setattr(hip_ops, "scaled_residual_rms_norm", lambda *a: calls.append(a[0].shape) or original(*a))
    train(make_model(fused_residual_norm=True), batch, 1, 0.05)
    assert len(calls) == 4  # once a layer
    calls.clear()
    train(make_model(), batch, 1, 0.05)
    assert not calls


@pytest.mark.parametrize("recompute", ["full"])
def test_recomputation_with_the_operator_changes_nothing(make_model, batch, recompute):
    plain, _ = train(make_model(fused_residual_norm=True), batch, 2, 0.05)
    again, _ = train(
        make_model(fused_residual_norm=True, recompute_granularity=recompute, recompute_method="uniform", recompute_num_layers=1),
        batch, 2, 0.05,
    )
    assert torch.equal(plain, again)
