# SPDX-License-Identifier: Apache-2.0
"""The whole model on the versions of its operators: HIP, built for the CPU, trains as the reference does; every
operator is called.
"""

from collections import Counter

import pytest
import torch

import hip_ops
from tests.model.steps import assert_same_bits, train

# Calls of a training step of 4 layers. A merge and the norm behind it are one call, except for the last merge: the block
# applies the norm behind it.
CALLS = {
    "affine_rms_norm": 1,
    "scaled_residual_rms_norm": 7,
    "scale_residual": 1,
    "rms_norm": 1,
    "cca_prologue": 4,
    "router_mlp": 4,
    "router_mlp_backward": 4,
    "sort_by_expert": 4,
    "permute_to_experts": 4,
    "unpermute_from_experts": 4,
    "weighted_swiglu": 4,
    "weighted_swiglu_backward": 4,
    "grouped_rows": 4 * 4,
    "grouped_outer_": 4 * 2,
    "linear_cross_entropy": 1,
}
RECOMPUTE = {
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    **{
        name: dict(recompute_granularity="selective", recompute_modules=[name])
        for name in ("core_attn", "moe", "permute", "layernorm")
    },
}


@pytest.mark.parametrize(
    "options",
    [{}, dict(skip_output="identity", temperature_form="exp"), dict(moe_skip_expert=False, router_eda=False)],
    ids=["zaya1", "identity", "no_skip"],
)
def test_hip_trains_as_the_reference(make_model, batch, options):
    # HIP's CCA prologue is for heads of 128 channels in bf16, so fp32 shows the other operators.
    expected = train(make_model(**options), batch, 3, 0.05)
    assert expected[0][-1] < expected[0][0]
    with hip_ops.use_kernels("hip"):
        found = train(make_model(**options), batch, 3, 0.05)
    torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        torch.testing.assert_close(
            found[1][name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("sizes", [{}, dict(hidden_size=128, kv_channels=128)], ids=["small", "heads_of_128"])
def test_hip_in_bf16_stays_within_its_noise(make_model, batch, sizes):
    options = dict(params_dtype=torch.bfloat16, bf16=True, **sizes)
    expected, _ = train(make_model(**options), batch, 2, 0.05)
    with hip_ops.use_kernels("hip"):
        found, _ = train(make_model(**options), batch, 2, 0.05)
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    in_fp32, _ = train(make_model(**sizes), batch, 2, 0.05)
    torch.testing.assert_close(expected, in_fp32, rtol=1e-2, atol=1e-2)


def test_hip_in_bf16_has_the_gradients_of_the_reference(make_model, batch):
    """Gradients of the first step agree; later steps would start from other weights. The temperatures' gradients nearly
    cancel; tests/model/test_attention.py has them.
    """
    options = dict(params_dtype=torch.bfloat16, bf16=True, hidden_size=128, kv_channels=128)
    _, expected = train(make_model(**options), batch, 1, 0.05)
    with hip_ops.use_kernels("hip"):
        _, found = train(make_model(**options), batch, 1, 0.05)
    assert found.keys() == expected.keys()
    differ = 0
    for name, gradient in expected.items():
        if not name.endswith("temperature"):
            distance = (found[name].double() - gradient.double()).norm()
            assert distance <= 0.05 * gradient.double().norm(), name
            differ += bool(distance)
    assert differ > len(expected) // 2, "two versions"


def test_every_operator_is_called(make_model, batch, monkeypatch):
    calls = Counter()
    for name in CALLS:
        original = getattr(hip_ops, name)

        def counted(*arguments, name=name, original=original, **named):
            calls[name] += 1
            return original(*arguments, **named)

        monkeypatch.setattr(hip_ops, name, counted)
    ropes, prologue = [], hip_ops.cca_prologue
    monkeypatch.setattr(hip_ops, "cca_prologue", lambda *a, **k: ropes.append(a[6]) or prologue(*a, **k))
    train(make_model(), batch, 1, 0.05)
    assert calls == CALLS
    assert all(rope is ropes[0] for rope in ropes), "the layers share one table"


# Megatron compiles a C++ extension at the first layernorm recomputation.
@pytest.mark.parametrize(
    "recompute", [pytest.param(name, marks=[pytest.mark.slow] * ("layernorm" in name)) for name in RECOMPUTE]
)
def test_recomputation_changes_nothing(make_model, batch, recompute):
    plain, again = make_model(), make_model(**RECOMPUTE[recompute])
    expected, found = train(plain, batch, 2, 0.05), train(again, batch, 2, 0.05)
    if recompute == "layernorm":  # other operators: the merge and its norm are two
        torch.testing.assert_close(found[0], expected[0], rtol=1e-6, atol=0)
    else:
        assert_same_bits(found, expected)
    for ours, theirs in zip(again.decoder.layers, plain.decoder.layers, strict=True):
        assert torch.equal(ours.mlp.router.tokens_per_expert, theirs.mlp.router.tokens_per_expert), (
            "a token counts once"
        )
