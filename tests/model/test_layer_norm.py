# SPDX-License-Identifier: Apache-2.0
"""model.normalization=LayerNorm: the model against plain torch, and what else knows of the bias."""

from argparse import Namespace

import pytest
import torch
import torch.nn.functional as F

import hip_ops
from tests.model.steps import train
from tests.parity.state_dict import from_hf, to_hf
from zaya_plugin.config.messages import check_transformers_has
from zaya_plugin.model.residual import ZayaLayerNorm
from zaya_plugin.optim.parameter_role import assign
from zaya_plugin.plan.flops import Shape, count_parameters

NORMS = 2 * 4 + 1  # of a model of 4 layers


def plain_torch(monkeypatch):
    """The model's three ways to a LayerNorm, as a user of torch writes them."""

    def norm(x, weight, bias, eps):
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def affine(x, bias, scale, weight, norm_bias, eps, dtype):
        stream = ((x + bias) * scale).to(dtype)
        return norm(stream, weight, norm_bias, eps), stream

    def merge(output, residual, b_o, s_o, b_x, s_x, weight, bias, eps):
        stream = (output + b_o) * s_o + (residual + b_x) * s_x
        return norm(stream, weight, bias, eps), stream

    for name, function in (("layer_norm", norm), ("affine_layer_norm", affine), ("scaled_residual_layer_norm", merge)):
        monkeypatch.setattr(hip_ops, name, function)


@pytest.mark.parametrize(
    "kernels, options",
    [
        ("reference", {}),
        ("hip", dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)),
    ],
    ids=["reference-kept", "hip-recomputed"],
)
def test_steps_are_those_of_plain_torch(make_model, batch, monkeypatch, kernels, options):
    with hip_ops.use_kernels(kernels):
        losses, gradients = train(make_model(normalization="LayerNorm", **options), batch, 3, 0.05)
    with monkeypatch.context() as patched:
        plain_torch(patched)
        expected, wanted = train(make_model(normalization="LayerNorm"), batch, 3, 0.05)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=1e-6)
    assert gradients.keys() == wanted.keys()
    assert sum(name.endswith("norm.bias") for name in gradients) == NORMS
    for name, gradient in wanted.items():
        assert (gradients[name] - gradient).norm() <= 1e-4 * gradient.norm() + 1e-7, name
    assert not torch.allclose(expected, train(make_model(), batch, 3, 0.05)[0], rtol=1e-3), "RMSNorm is another model"


def test_the_bias_is_a_vector_like_the_weight(make_config, make_model):
    """Starts at 0, replicated over tensor-parallel ranks, under AdamW without weight decay, in sharded checkpoints."""
    parallel = dict(tensor_model_parallel_size=2, expert_tensor_parallel_size=1, sequence_parallel=True)
    norm = ZayaLayerNorm(make_config(normalization="LayerNorm", **parallel), 32, 1e-5)
    assert norm.bias.sequence_parallel and norm.weight.sequence_parallel and not norm.bias.any()
    model = make_model(normalization="LayerNorm")
    biases = [name for name, _ in model.named_parameters() if name.endswith("norm.bias")]
    assert len(biases) == NORMS
    roles = assign(model.named_parameters())
    assert all((roles[name].optimizer, roles[name].weight_decay_mult) == ("adamw", 0.0) for name in biases)
    assert {*biases} <= {*model.sharded_state_dict()} and {*biases} <= {*model.state_dict()}


@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_the_plan_counts_the_parameters(make_model, normalization):
    model = make_model(normalization=normalization)
    shape = Shape(4, 32, 4, 2, 8, 4, 24, 16, 64, normalization=normalization)
    assert sum(count_parameters(shape).values()) == sum(p.numel() for p in model.parameters())


def test_transformers_has_no_such_model(make_model):
    model = make_model(normalization="LayerNorm")
    for call in (
        lambda: to_hf(model.state_dict(), model.config),
        lambda: from_hf({}, Namespace(normalization="LayerNorm")),
        lambda: check_transformers_has("LayerNorm"),
    ):
        with pytest.raises(ValueError, match=r"^model.normalization=LayerNorm: .* Allowed: RMSNorm. Fix: model\.norm"):
            call()
