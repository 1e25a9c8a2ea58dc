# SPDX-License-Identifier: Apache-2.0
"""Test when an operator bypasses torch's dispatcher, and that both ways differ only in time."""

import contextlib
import sys
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import hip_ops
from hip_ops.runtime import operator
from tests.hip_ops.operators_seen import OperatorsSeen

pytestmark = pytest.mark.usefixtures("nothing_selected", "no_function_modes")
WAYS = []  # of each call of the test's operators: "direct" or "registered"


def record() -> None:
    """Records a call; a reference that `Operator.run` calls does so."""
    WAYS.append("direct" if sys._getframe(3).f_code.co_filename == operator.__file__ else "registered")


def multiply(a: Tensor, b: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    if not a.is_meta:
        record()
    return a * b * factor, a.sum()


def _save(ctx, inputs, output):
    a, b, ctx.factor = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, b)


def _gradients(ctx, grad, nothing):
    assert nothing is None and len(ctx.needs_input_grad) == 3
    a, b = ctx.saved_tensors
    return grad * b * ctx.factor, grad * a * ctx.factor if ctx.needs_input_grad[1] else None, None


@pytest.fixture
def product(make_operator):
    """(a * b * factor, sum of a), with gradients of the first."""
    made = make_operator(
        multiply,
        takes="a [n] fp32\n b [n] fp32",
        example=lambda device: (torch.ones(2, device=device), torch.ones(2, device=device), 1.0),
    )
    made.register_autograd(_gradients, setup_context=_save)
    return made


def add_to_(a: Tensor, total: Tensor) -> None:
    record()
    total.detach().view(-1).numpy()[:] += a.detach().flatten().numpy()  # as a kernel does it: unseen by torch


@pytest.fixture
def add_(make_operator):
    example = lambda device: (torch.ones(2), torch.ones(2))  # noqa: E731
    return make_operator(add_to_, takes="a [n] fp32\n total [n] fp32", mutates=("total",), example=example)


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {}))


class Subclass(torch.Tensor):
    pass


@pytest.fixture
def tensors():
    WAYS.clear()
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([4.0, 5.0, 6.0])


def test_plain_tensors_go_directly(product, tensors):
    a, b = tensors
    for parameter, grad in ((a, True), (torch.nn.Parameter(a.detach()), True), (a, False)):
        with contextlib.nullcontext() if grad else torch.no_grad():
            out, total = product(parameter, b, 2.0)
        assert (
            torch.equal(out, torch.tensor([8.0, 20.0, 36.0])) and out.requires_grad == grad and not total.requires_grad
        )
        assert grad == (out.grad_fn is not None) and (
            not grad or type(out.grad_fn).__name__ == f"hip_ops_{product.name}Backward"
        )
    assert product(b, b, 1.0)[0].grad_fn is None
    assert WAYS == ["direct"] * 4


def test_both_ways_give_the_same_gradients_and_errors(product, tensors):
    found = []
    for mode in (contextlib.nullcontext(), OperatorsSeen()):
        a, b = tensors[0].detach().clone().requires_grad_(), tensors[1].clone().requires_grad_()
        with mode:
            out, _ = product(a, b, 2.0)
        (first,) = torch.autograd.grad(out.sum(), a, create_graph=True)  # one of two, and twice
        second = torch.autograd.grad(first.sum(), b)[0]
        out, _ = product(a, b, 2.0)
        with torch.no_grad():
            b.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
        found.append([first.detach(), second])
    assert WAYS[0] == "direct" and f"hip_ops::{product.name}" in mode.names
    assert all(map(torch.equal, *found)) and torch.equal(found[0][1], torch.full((3,), 2.0))


def test_saved_tensors_pass_through_hooks(product, tensors):
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
        out, _ = product(*tensors, 2.0)
    out.sum().backward()
    assert packed == [(3,), (3,)] and WAYS == ["direct"] and torch.equal(tensors[0].grad, 2 * tensors[1])


def test_where_something_may_look_torchs_operator_runs(product, tensors):
    (a, b), name = tensors, f"hip_ops::{product.name}"
    want, plain = (2 * a * b).detach(), a.detach()
    with OperatorsSeen() as mode:
        assert torch.equal(product(plain, b, 2.0)[0], want) and mode.names[0] == name
    with Functions():
        assert torch.equal(product(a, b, 2.0)[0], want)
    assert torch.equal(product(a.detach().as_subclass(Subclass), b, 2.0)[0], want)
    assert WAYS == ["registered"] * 3
    with FakeTensorMode():
        assert product(torch.empty(7), torch.empty(7), 2.0)[0].shape == (7,)
    assert product(torch.empty(7, device="meta"), torch.empty(7, device="meta"), 2.0)[0].is_meta
    assert WAYS == ["registered"] * 3, "fake results are of the reference on meta tensors"
    assert torch.equal(torch.func.vmap(lambda t: product(t, b, 2.0)[0])(torch.ones(2, 3)), (2 * b).expand(2, 3))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda t: product(t, b, 2.0)[0].sum())(plain)
    assert name in str(torch.jit.trace(lambda t: product(t, b, 2.0)[0], plain, check_trace=False).graph)
    assert "direct" not in WAYS


def test_both_ways_refuse_the_same_arguments(product, tensors):
    for call in (product, product.registered):
        with pytest.raises(ValueError, match=rf"hip_ops.{product.name}: b has shape \(2,\). Allowed: \(3,\), \[n\]"):
            call(tensors[0], torch.ones(2), 2.0)
        with pytest.raises(ValueError, match="b is on meta. Allowed: on cpu like a"):
            product.run(tensors[0], torch.ones(3, device="meta"), 2.0)
    with FakeTensorMode(), pytest.raises(ValueError, match=r"b has shape \(2,\)"):
        product(torch.empty(3), torch.empty(2), 2.0)


def test_lists_of_plain_tensors_go_directly_without_gradients(make_operator):
    def add_all_(totals: Sequence[Tensor], amounts: Sequence[float]) -> None:
        record()
        for total, amount in zip(totals, amounts, strict=True):
            total.detach().numpy()[:] += amount

    example = lambda device: ([torch.ones(2)], [1.0])  # noqa: E731
    made = make_operator(add_all_, mutates=("totals",), example=example)
    WAYS.clear()
    totals = [torch.nn.Parameter(torch.zeros(2)), torch.zeros(3)]
    for call, way in ((made, "direct"), (made.registered, "registered")):
        versions = [total._version for total in totals]
        with torch.no_grad():
            assert call(totals, [1.0, 2.0]) is None and WAYS.pop() == way
        assert [total._version for total in totals] == [version + 1 for version in versions]
    made(totals[1:], [1.0])
    with torch.no_grad():
        made([totals[1].as_subclass(Subclass)], [1.0])
        made([torch.ones(2, device="meta")], [1.0])
        assert WAYS == ["registered"] * 2 and totals[0].tolist() == [2.0] * 2 and totals[1].tolist() == [6.0] * 3


def test_compiles_whole_to_torchs_operator(product, tensors):
    a, b = tensors
    graphs = []

    def keep(module, inputs):
        graphs.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module

    out = torch.compile(lambda x, y: product(x, y, 2.0)[0] + 1, fullgraph=True, backend=keep)(a, b)
    assert torch.equal(out, 2 * a * b + 1) and product.registered._opoverload in graphs[0]


def test_autocast_reaches_inside_either_way(make_operator):
    def square(x: Tensor) -> Tensor:
        return x @ x

    x = torch.randn(4, 4)
    made = make_operator(square, example=lambda device: (x,))
    with torch.autocast("cpu", torch.bfloat16):
        assert made(x).dtype == made.registered(x).dtype == torch.bfloat16


def test_what_is_written_in_place_counts_as_changed(add_):
    WAYS.clear()
    a, total = torch.ones(3), torch.zeros(3)
    weight = torch.ones(3, requires_grad=True)
    for add in (add_, add_.registered):
        product_with_total = weight * total
        before = total._version
        assert add(a, total) is None and total._version == before + 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product_with_total.sum().backward()
    assert torch.equal(total, torch.full((3,), 2.0))
    with torch.inference_mode():
        total = torch.zeros(3)
        add_(a, total)
        assert torch.equal(total, a)
    assert WAYS == ["direct", "registered", "direct"]


def test_opcheck(product, add_, tensors):
    """Schema, mutation, fake tensors, autograd registration and AOT dispatch, torch's own checks."""
    torch.library.opcheck(product.registered._opoverload, (*tensors, 2.0))
    torch.library.opcheck(add_.registered._opoverload, (torch.ones(3), torch.zeros(3)))


def test_results_without_a_formula_refuse_the_backward_pass():
    """This holds for direct calls too: calls that need gradients go through torch's operator."""
    x, matrices = torch.randn(4, 3, requires_grad=True), torch.randn(2, 3, 5)
    out = hip_ops.grouped_rows(x, matrices, torch.tensor([1, 4], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        out.sum().backward()
    y, _ = hip_ops.add_rms_norm(x, x.detach(), torch.ones(3))
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        first.sum().backward()
