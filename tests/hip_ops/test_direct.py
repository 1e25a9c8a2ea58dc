# SPDX-License-Identifier: Apache-2.0
"""When an operator goes past torch's dispatch and when not, and that nobody can tell by anything but the time."""

import contextlib
import sys

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

import hip_ops
from hip_ops import direct
from hip_ops.direct import direct_operator
from hip_ops.grouped_product import _outer_op
from hip_ops.vocabulary_rows import overwrite_with_gradient
from tests.hip_ops.operators_seen import OperatorsSeen

pytestmark = pytest.mark.usefixtures("no_function_modes")
WAYS = []  # of each call of the test's operator: "direct" or "registered"


@direct_operator("hip_ops_test::product", mutates_args=())
def product(a: torch.Tensor, b: torch.Tensor, factor: float) -> tuple[torch.Tensor, torch.Tensor]:
    WAYS.append("direct" if sys._getframe(1).f_code.co_filename == direct.__file__ else "registered")
    return a * b * factor, a.sum()


@product.register_fake
def _(a, b, factor):
    return torch.empty_like(a), a.new_empty(())


def _save(ctx, inputs, output):
    a, b, ctx.factor = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(a, b)


def _gradients(ctx, grad, nothing):
    assert nothing is None and len(ctx.needs_input_grad) == 3
    a, b = ctx.saved_tensors
    return grad * b * ctx.factor, grad * a * ctx.factor if ctx.needs_input_grad[1] else None, None


product.register_autograd(_gradients, setup_context=_save)


@direct_operator("hip_ops_test::add_", mutates_args=("total",))
def add_(a: torch.Tensor, total: torch.Tensor) -> None:
    total.detach().view(-1).numpy()[:] += a.detach().flatten().numpy()  # as a kernel does it: torch does not hear of it


@add_.register_fake
def _(a, total):
    return None


class Functions(TorchFunctionMode):
    def __torch_function__(self, function, types, arguments=(), keywords=None):
        return function(*arguments, **(keywords or {}))


class Subclass(torch.Tensor):
    pass


@pytest.fixture
def tensors():
    WAYS.clear()
    return torch.tensor([1.0, 2.0, 3.0], requires_grad=True), torch.tensor([4.0, 5.0, 6.0])


def test_plain_tensors_go_directly(tensors):
    a, b = tensors
    for parameter, grad in ((a, True), (torch.nn.Parameter(a.detach()), True), (a, False)):
        with contextlib.nullcontext() if grad else torch.no_grad():
            out, total = product(parameter, b, 2.0)
        assert (
            torch.equal(out, torch.tensor([8.0, 20.0, 36.0])) and out.requires_grad == grad and not total.requires_grad
        )
        assert grad == (out.grad_fn is not None) and (
            not grad or type(out.grad_fn).__name__ == "hip_ops_test_productBackward"
        )
    assert product(b, b, 1.0)[0].grad_fn is None
    assert WAYS == ["direct"] * 4


def test_both_ways_give_the_same_gradients_and_errors(tensors):
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
    assert WAYS[0] == "direct" and "hip_ops_test::product" in mode.names
    assert all(map(torch.equal, *found)) and torch.equal(found[0][1], torch.full((3,), 2.0))


def test_saved_tensors_pass_through_hooks(tensors):
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t.clone(), lambda t: t):
        out, _ = product(*tensors, 2.0)
    out.sum().backward()
    assert packed == [(3,), (3,)] and WAYS == ["direct"] and torch.equal(tensors[0].grad, 2 * tensors[1])


def test_where_somebody_looks_torchs_operator_runs(tensors):
    a, b = tensors
    want, plain = (2 * a * b).detach(), a.detach()
    with OperatorsSeen() as mode:
        assert torch.equal(product(plain, b, 2.0)[0], want) and mode.names[0] == "hip_ops_test::product"
    with Functions():
        assert torch.equal(product(a, b, 2.0)[0], want)
    assert torch.equal(product(a.detach().as_subclass(Subclass), b, 2.0)[0], want)
    assert WAYS == ["registered"] * 3
    with FakeTensorMode():
        assert product(torch.empty(7), torch.empty(7), 2.0)[0].shape == (7,)
    assert product(torch.empty(7, device="meta"), torch.empty(7, device="meta"), 2.0)[0].is_meta
    assert WAYS == ["registered"] * 3, "shapes come from register_fake"
    assert torch.equal(torch.func.vmap(lambda t: product(t, b, 2.0)[0])(torch.ones(2, 3)), (2 * b).expand(2, 3))
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda t: product(t, b, 2.0)[0].sum())(plain)
    assert "hip_ops_test::product" in str(
        torch.jit.trace(lambda t: product(t, b, 2.0)[0], plain, check_trace=False).graph
    )
    assert "direct" not in WAYS


def test_compiles_whole_to_torchs_operator(tensors):
    a, b = tensors
    graphs = []

    def keep(module, inputs):
        graphs.append([node.target for node in module.graph.nodes if node.op == "call_function"])
        return module

    out = torch.compile(lambda x, y: product(x, y, 2.0)[0] + 1, fullgraph=True, backend=keep)(a, b)
    assert torch.equal(out, 2 * a * b + 1) and torch.ops.hip_ops_test.product.default in graphs[0]


def test_autocast_reaches_inside_either_way(tensors):
    x = torch.randn(4, 4)
    operator = direct_operator("hip_ops_test::matmul", mutates_args=())(_matmul)
    with torch.autocast("cpu", torch.bfloat16):
        assert operator(x).dtype == operator.registered(x).dtype == torch.bfloat16


def _matmul(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def test_what_is_written_in_place_counts_as_changed():
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
    assert _outer_op._mutated == (0,) and overwrite_with_gradient._mutated == (0,)


def test_results_without_a_formula_refuse_the_backward_pass():
    """In direct calls too: with a gradient to record, those go through torch's operator."""
    x, matrices = torch.randn(4, 3, requires_grad=True), torch.randn(2, 3, 5)
    out = hip_ops.grouped_rows(x, matrices, torch.tensor([1, 4], dtype=torch.int32))
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        out.sum().backward()
    y, _ = hip_ops.add_rms_norm(x, x.detach(), torch.ones(3))
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        first.sum().backward()
