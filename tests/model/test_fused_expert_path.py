# SPDX-License-Identifier: Apache-2.0
"""The model with hip_ops' expert path and without: the same training."""

import pytest
import torch

from tests.model.test_fused_residual_norm import train
from zaya_plugin.model.experts import ExpertMLP


@pytest.mark.parametrize("skip_output", ["zero", "identity"])
def test_fp32_gives_the_same_bits(make_model, batch, skip_output):
    plain, plain_gradients = train(make_model(skip_output=skip_output), batch, 4, 0.05)
    fused, fused_gradients = train(make_model(skip_output=skip_output, fused_expert_path=True), batch, 4, 0.05)
    assert torch.equal(plain, fused)
    assert plain_gradients.keys() == fused_gradients.keys()
    for name, gradient in plain_gradients.items():
        assert torch.equal(gradient, fused_gradients[name]), name
    assert plain[-1] < plain[0]


@pytest.mark.parametrize("backend", ["torch", "hip"])
def test_other_back_ends_and_bf16_stay_within_their_noise(make_model, batch, backend):
    """The HIP sources, built for the CPU, give the losses of plain fp32 training to 1e-6; bf16 within its noise."""
    import hip_ops

    plain, plain_gradients = train(make_model(), batch, 2, 0.05)
    with hip_ops.use_backend(backend):
        fused, fused_gradients = train(make_model(fused_expert_path=True), batch, 2, 0.05)
        torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-6)
        for name, gradient in plain_gradients.items():
            torch.testing.assert_close(
                fused_gradients[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )
        options = dict(params_dtype=torch.bfloat16, bf16=True)
        plain, _ = train(make_model(**options), batch, 2, 0.05)
        fused, _ = train(make_model(fused_expert_path=True, **options), batch, 2, 0.05)
        torch.testing.assert_close(plain, fused, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(
    "recompute",
    [
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        *(dict(recompute_granularity="selective", recompute_modules=[m]) for m in ("moe", "permute")),
    ],
    ids=["full", "moe", "permute"],
)
def test_recomputation_changes_nothing(make_model, batch, recompute):
    plain, _ = train(make_model(fused_expert_path=True), batch, 2, 0.05)
    again, _ = train(make_model(fused_expert_path=True, **recompute), batch, 2, 0.05)
    assert torch.equal(plain, again)


def test_the_switch_reaches_the_operators(make_model, batch, monkeypatch):
    import hip_ops

    calls = []
    for name in (
        "sort_by_expert",
        "permute_to_experts",
        "unpermute_from_experts",
        "weighted_swiglu",
        "weighted_swiglu_backward",
    ):
        original = getattr(hip_ops, name)
        monkeypatch.setattr(hip_ops, name, lambda *a, name=name, original=original: calls.append(name) or original(*a))
    train(make_model(fused_expert_path=True), batch, 1, 0.05)
    assert sorted(calls) == sorted([*hip_names(calls)] * 4)  # once a layer
    calls.clear()
    train(make_model(), batch, 1, 0.05)
    assert not calls


def hip_names(calls: list[str]) -> set[str]:
    assert len(set(calls)) == 5, f"only {set(calls)} were called"
    return set(calls)


@pytest.mark.parametrize("counts", [[2, 2, 2], [0, 5, 0], [1, 0, 2], [0, 0, 0]], ids=str)
def test_gradcheck_of_experts_without_rows_of_no_expert(counts):
    """Where fused, rows of no expert hold anything: what the way back reads is checked, in fp64."""
    rows, live = 7, sum(counts)
    x, weights = (
        torch.randn(rows, 5, dtype=torch.float64, requires_grad=True),
        torch.rand(rows, dtype=torch.float64, requires_grad=True),
    )
    matrices = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in [(6, 5)] * 3 + [(5, 3)] * 3]
    offsets = torch.tensor(counts).cumsum(0).int()

    def run(fused):
        return lambda x, w, *m: ExpertMLP.apply(x[:rows], w, offsets, 3, fused, "auto", None, *m)[:live]

    if live:
        assert torch.autograd.gradcheck(run(True), (x, weights, *matrices))
    assert torch.equal(run(True)(x, weights, *matrices), run(False)(x, weights, *matrices))
