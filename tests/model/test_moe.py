# SPDX-License-Identifier: Apache-2.0
"""The experts of a layer, from a token to its output and back, against a plain loop over the experts."""

import pytest
import torch
import torch.nn.functional as F

import hip_ops
from zaya_plugin.model.experts import GroupedExperts
from zaya_plugin.model.moe import ZayaMoELayer

EXPERTS, TOKENS, WIDTH = 4, 700, 32
NAMES = [
    "output",
    "tokens",
    "weights",
    *(f"{fc} of {e}" for fc in ("linear_fc1", "linear_fc2") for e in range(EXPERTS)),
]


def by_a_loop(tokens, weights, ids, fc1, fc2, upstream):
    """The output and all gradients, expert by expert, in the order of the operations of hip_ops' references."""
    output, d_tokens, d_weights = torch.zeros_like(tokens), torch.zeros_like(tokens), torch.zeros_like(weights)
    d_fc1, d_fc2 = [], []
    for expert, (w1, w2) in enumerate(zip(fc1, fc2, strict=True)):
        mine = (ids == expert).nonzero().squeeze(1)
        x, weight, dy = tokens[mine], weights[mine].unsqueeze(1), upstream[mine]
        gate, up = (x @ w1.T).chunk(2, dim=1)
        output[mine] = (F.silu(gate) * up * weight) @ w2.T
        sigmoid, d_hidden = torch.sigmoid(gate), dy @ w2
        silu = gate * sigmoid
        d_weights[mine] = (d_hidden * (silu * up)).sum(1)
        d_hidden = d_hidden * weight
        d_gate = d_hidden * up * torch.addcmul(sigmoid, silu, 1 - sigmoid)
        d_gate_up = torch.cat((d_gate, silu * d_hidden), dim=1)
        d_fc1.append(d_gate_up.T @ x)
        d_fc2.append(dy.T @ (silu * up * weight))
        d_tokens[mine] = d_gate_up @ w1
    return output, d_tokens, d_weights, *d_fc1, *d_fc2


def case(make_config, dtype, empty=2):
    """A layer, its matrices, its inputs (tokens [T, h], weights [T], ids [T]) and upstream [T, h].

    No token chooses the expert `empty`. The id EXPERTS is the skip class.
    """
    sizes = dict(hidden_size=WIDTH, moe_ffn_hidden_size=WIDTH, num_moe_experts=EXPERTS)
    layer = ZayaMoELayer(make_config(**sizes), GroupedExperts, layer_number=1).to(dtype)
    fc1, fc2 = layer.experts.linear_fc1.matrices(), layer.experts.linear_fc2.matrices()
    with torch.no_grad():
        for matrix in (*fc1, *fc2):
            matrix.copy_(torch.randn(matrix.shape) / WIDTH**0.5)
    ids = torch.randint(0, EXPERTS + 1, (TOKENS,))
    ids[ids == empty] = EXPERTS
    tokens, upstream = (torch.randn(TOKENS, WIDTH).to(dtype) for _ in range(2))
    return layer, (fc1, fc2), (tokens.requires_grad_(), torch.rand(TOKENS).to(dtype).requires_grad_(), ids), upstream


def by_the_layer(layer, matrices, inputs, upstream):
    output = layer._local(*inputs)
    return output.detach(), *torch.autograd.grad(output, (*inputs[:2], *matrices[0], *matrices[1]), upstream)


@pytest.mark.parametrize("kernels", [{}, dict(expert_permutation="hip")], ids=["reference", "hip_permutation"])
def test_fp32_gives_the_bits_of_a_loop(make_config, kernels):
    """The layer equals a plain loop over the experts bit for bit in fp32: products, sums and the order of rows are
    the same.

    Each expert but one has more than 100 rows: BLAS computes products of few rows in another way. The width is a
    multiple of all vector registers: torch computes the exponentials of a row's tail in another way.
    """
    layer, matrices, inputs, upstream = case(make_config, torch.float32)
    counts = torch.bincount(inputs[2], minlength=EXPERTS + 1)
    assert counts[2] == 0 and counts[[0, 1, 3, 4]].min() > 100
    with hip_ops.use_kernels(**kernels):
        found = by_the_layer(layer, matrices, inputs, upstream)
    with torch.no_grad():
        expected = by_a_loop(*inputs, *matrices, upstream)
    for name, got, want in zip(NAMES, found, expected, strict=True):
        assert torch.equal(got, want), f"{name}: {int((got != want).sum())} of {want.numel()}"
        assert want.any() != name.endswith("of 2")
    skipped = inputs[2] == EXPERTS
    assert not any(each[skipped].any() for each in found[:3])


@pytest.mark.parametrize(
    "kernels", [dict(grouped_product="grouped_mm"), dict(kernels="hip")], ids=["grouped_mm", "hip"]
)
def test_other_versions_stay_within_roundings_of_the_loop(make_config, kernels):
    layer, matrices, inputs, upstream = case(make_config, torch.float32)
    with hip_ops.use_kernels(**kernels):
        found = by_the_layer(layer, matrices, inputs, upstream)
    with torch.no_grad():
        expected = by_a_loop(*inputs, *matrices, upstream)
    for name, got, want in zip(NAMES, found, expected, strict=True):
        torch.testing.assert_close(got, want, msg=lambda text, name=name: f"{name}: {text}")


def test_the_loop_has_the_gradients_of_autograd(make_config):
    """The loop's written-out gradients equal those of autograd over transformers' formula, in fp64."""
    _, matrices, (tokens, weights, ids), upstream = case(make_config, torch.float64)
    output = torch.zeros_like(tokens)
    for expert, (w1, w2) in enumerate(zip(*matrices, strict=True)):
        gate, up = (tokens @ w1.T).chunk(2, dim=1)
        rows = (F.silu(gate) * up) @ w2.T * weights.unsqueeze(1)
        output = torch.where((ids == expert).unsqueeze(1), rows, output)
    wanted = output, *torch.autograd.grad(output, (tokens, weights, *matrices[0], *matrices[1]), upstream)
    with torch.no_grad():
        found = by_a_loop(tokens, weights, ids, *matrices, upstream)
    for name, got, want in zip(NAMES, found, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")
