# SPDX-License-Identifier: Apache-2.0
"""The router's gradient of its input, added to that of the experts by the product that makes it: autograd's numbers,
without its addition.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import hip_ops
from tests.model.steps import train
from tests.model.test_main_grad import weight_with_main_grad
from zaya_plugin.model.router import InputAndLinear, ZayaRouter, input_and_linear

IDS = torch.tensor([2, 0, 3, 1, 0, 2, 3])  # class 3 is that of no expert
OF_AN_EXPERT = (IDS < 3).float().view(7, 1, 1)


def gather(tokens, ids=IDS, num_experts=3):
    return hip_ops.permute_to_experts(tokens.flatten(0, 1), hip_ops.sort_by_expert(ids, num_experts))[0]


class Shapes(TorchDispatchMode):
    """Operators that ran, and the shapes of their first tensors."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        first = next((a for a in arguments if isinstance(a, torch.Tensor)), None)
        self.seen.append((function.name().removeprefix("aten::"), None if first is None else tuple(first.shape)))
        return function(*arguments, **(keywords or {}))


def test_gradcheck_behind_a_gather():
    x, weight = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in [(7, 1, 5), (3, 5)])

    def run(x, weight):
        tokens, linear = InputAndLinear.apply(x, weight)
        return gather(tokens), linear

    assert torch.autograd.gradcheck(run, (x, weight))


@pytest.mark.parametrize("used", ["both", "tokens", "linear"])
def test_gradients_are_autograds_and_come_twice(used):
    x, weight = torch.randn(7, 1, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    to_rows, to_linear = torch.randn(7, 5), torch.randn(7, 1, 3)

    def loss(tokens, linear):
        return (
            (gather(tokens) * to_rows).sum() * (used != "linear")
            + (linear * to_linear).sum() * (used != "tokens")
            + (x**2).sum()
        )

    def outputs(tokens, linear):
        rows = [gather(tokens), to_rows], [linear, to_linear], [x**2, torch.ones_like(x)]
        chosen = [
            row
            for row, name in zip(rows, ("tokens", "linear", ""), strict=True)
            if name in (used, "") or (used == "both")
        ]
        return zip(*chosen, strict=True)

    wanted = torch.autograd.grad(loss(x, F.linear(x, weight)), (x, weight))
    results, upstream = outputs(*input_and_linear(x, weight))
    for _ in range(2):
        found = torch.autograd.grad(results, (x, weight), upstream, retain_graph=True, allow_unused=True)
        torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(
            torch.zeros_like(weight) if found[1] is None else found[1], wanted[1], rtol=1e-6, atol=1e-6
        )


def test_the_gathers_own_tensor_becomes_the_gradient():
    """The product writes into the tensor that the gather made: no addition and no other tensor of the input's size."""
    x, weight = torch.randn(7, 1, 5, requires_grad=True), weight_with_main_grad(3, 5)
    before = weight.main_grad.clone()
    tokens, linear = input_and_linear(x, weight)
    rows = gather(tokens)
    upstream = torch.randn(7, 1, 3)
    with Shapes() as ops:
        torch.autograd.backward([rows, linear], [torch.ones(7, 5), upstream], inputs=[x, weight])
    sized = [
        name
        for name, shape in ops.seen
        if shape in ((7, 5), (7, 1, 5)) and name not in ("view", "_unsafe_view", "t", "detach")
    ]
    assert sized == ["hip_ops::gather_rows", "addmm.out"], ops.seen
    torch.testing.assert_close(x.grad, OF_AN_EXPERT + upstream @ weight)
    torch.testing.assert_close(weight.main_grad, before + upstream.flatten(0, 1).t() @ x.detach().flatten(0, 1))
    assert weight.grad_added_to_main_grad


def test_what_does_not_lie_row_by_row_is_left_as_it_is():
    x, weight = torch.randn(4, 5, requires_grad=True), torch.randn(3, 5, requires_grad=True)
    tokens, linear = InputAndLinear.apply(x, weight)
    spread = torch.randn(5).expand(4, 5)
    before = spread.clone()
    torch.autograd.backward([tokens, linear], [spread, torch.ones(4, 3)])
    torch.testing.assert_close(x.grad, before + weight.sum(0))
    assert torch.equal(spread, before)


def test_a_frozen_weight_and_an_input_without_gradient():
    x, weight = torch.randn(7, 1, 5, requires_grad=True), torch.randn(3, 5)
    tokens, linear = input_and_linear(x, weight)
    (gather(tokens).sum() + linear.sum()).backward()
    torch.testing.assert_close(x.grad, OF_AN_EXPERT + weight.sum(0))
    weight.requires_grad_()
    x = x.detach()
    tokens, linear = input_and_linear(x, weight)
    assert tokens is x
    linear.sum().backward()
    torch.testing.assert_close(weight.grad, x.sum((0, 1)).expand(3, 5))


def test_bf16_rounds_once_less():
    x, weight = torch.randn(64, 1, 32), torch.randn(16, 32) / 4
    to_rows, to_linear = torch.randn(64, 32).bfloat16(), torch.randn(64, 1, 16).bfloat16()
    x, weight = x.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()
    ids = torch.randperm(64)  # a token an expert, so that these are the places of the rows
    exact = to_rows.double()[ids].view_as(x) + to_linear.double() @ weight.double()
    errors = []
    for tokens, linear in ((x, F.linear(x, weight)), input_and_linear(x, weight)):
        (found,) = torch.autograd.grad([gather(tokens, ids, 64), linear], x, [to_rows, to_linear])
        errors.append((found.double() - exact).norm() / exact.norm())
    assert errors[1] < 2.0**-8 and errors[1] < 0.9 * errors[0]


RECOMPUTE = {
    "nothing": {},
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "selective": dict(recompute_granularity="selective", recompute_modules=["layernorm", "permute"]),
    "moe": dict(recompute_granularity="selective", recompute_modules=["moe"]),
}


@pytest.mark.parametrize(  # for layernorm Megatron compiles a C++ extension
    "recompute", [pytest.param(name, marks=[pytest.mark.slow] * (name == "selective")) for name in RECOMPUTE]
)
def test_a_model_trains_as_by_autograds_additions(make_model, batch, monkeypatch, recompute):
    options = RECOMPUTE[recompute]
    with monkeypatch.context() as patch:
        patch.setattr(ZayaRouter, "project", lambda self, hidden_states: (hidden_states, None))
        plain, wanted = train(make_model(**options), batch, 2, 0.05)
    ours, found = train(make_model(**options), batch, 2, 0.05)
    torch.testing.assert_close(ours, plain, rtol=1e-6, atol=1e-6)
    for name, gradient in wanted.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("skip_output", ["zero", "identity"])
def test_only_where_nothing_else_reads_the_tokens(make_model, batch, skip_output):
    """With skip_output=identity the tokens have a second reader, so the product does not write into their gradient."""
    model = make_model(skip_output=skip_output)
    ids, positions, labels = batch()
    with Shapes() as ops:
        model(ids, positions, None, labels=labels).mean().backward()
    assert sum(name == "addmm.out" and shape == (24, 32) for name, shape in ops.seen) == (
        4 if skip_output == "zero" else 0
    )


def test_hooks_of_modules_keep_what_they_were_shown(make_model, batch):
    """A gradient that a hook on the layer, the router or the experts keeps is not overwritten."""
    model = make_model()
    kept = []

    def keep(module, *gradients):
        kept.extend((tensor, tensor.clone()) for group in gradients for tensor in group if tensor is not None)

    for layer in model.decoder.layers:
        for module in (layer.mlp, layer.mlp.router, layer.mlp.experts):
            module.register_full_backward_hook(keep)
    ids, positions, labels = batch()
    model(ids, positions, None, labels=labels).mean().backward()
    assert len(kept) >= 4 * 8 and all(torch.equal(tensor, before) for tensor, before in kept)
