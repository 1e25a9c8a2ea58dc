# SPDX-License-Identifier: Apache-2.0
"""Test residual merge + RMSNorm or LayerNorm as operators on the CPU: the torch reference, and the HIP sources built with g++."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hip_ops
from hip_ops import use_kernels
from hip_ops.ops.rms_norm import hip as hip_kernels
from hip_ops.ops.rms_norm import reference
from hip_ops.runtime.operator import OPERATORS
from tests.hip_ops.rms_norm_cases import (
    BF16,
    FP32,
    FP64,
    VECTORS,
    Case,
    Exact,
    backward_arguments,
    check,
    compare,
    make,
    of_module,
    ulp,
)

DTYPES = [(BF16, FP32, BF16), (BF16, BF16, BF16), (FP32, FP32, FP32), (FP32, FP32, BF16), (FP32, BF16, FP32)]


FORMS = [(False, False), (True, False), (False, True), (True, True)]  # scaled, centered
IDS = ["plain", "zaya", "plain-layer_norm", "zaya-layer_norm"]
of_all_forms = pytest.mark.parametrize("scaled, centered", FORMS, ids=IDS)


def operator(case: Case):
    if case.centered:
        return hip_ops.scaled_residual_layer_norm if case.scaled else hip_ops.add_layer_norm
    return hip_ops.scaled_residual_rms_norm if case.scaled else hip_ops.add_rms_norm


def leaves(case: Case) -> list[torch.Tensor]:
    return [t.detach().requires_grad_() for t in make(case).arguments]


@of_all_forms
@pytest.mark.parametrize("dtypes", [*DTYPES, (FP64, FP64, FP64)], ids=str)
def test_reference_against_fp64(scaled, centered, dtypes):
    for rows, hidden, d_new_residual in ((9, 33, True), (5, 256, False), (40, 8, True)):
        check(of_module(reference), Case(scaled, rows, hidden, *dtypes, d_new_residual, centered=centered))


@pytest.mark.parametrize("schedule", ["forward", "reverse", "random:11"])
@pytest.mark.parametrize(
    "case",
    [
        Case(True, 7, 2048),
        Case(False, 9, 2048, residual_dtype=BF16),
        Case(False, 30, 512),
        Case(True, 43, 256, pad=16),
        Case(True, 11, 1024, d_new_residual=False),
        Case(True, 3, 4096, pad=8),
        Case(False, 2, 8192, residual_dtype=BF16),
        Case(True, 2, 8192),
        Case(True, 5, 2051, pad=1),
        Case(False, 6, 45, FP32, FP32, FP32),
        Case(True, 5, 264, FP32, BF16, FP32),
        Case(True, 6, 2056, BF16, BF16, BF16),
        Case(False, 4, 1, FP32, BF16, BF16),
        Case(True, 7, 2048, centered=True),
        Case(False, 43, 256, residual_dtype=BF16, pad=16, centered=True),
        Case(True, 2, 8192, centered=True),
        Case(True, 5, 2051, pad=1, centered=True),
        Case(False, 6, 45, FP32, FP32, FP32, centered=True),
        Case(False, 9, 2048, centered=True, offset=100.0),
    ],
    ids=str,
)
def test_cpu_build_against_fp64(monkeypatch, case, schedule):
    monkeypatch.setenv("HO_CPU_SCHEDULE", schedule)
    check(of_module(hip_kernels), case)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    scaled=st.booleans(),
    rows=st.integers(1, 12),
    hidden=st.one_of(st.integers(1, 300), st.sampled_from([256, 512, 1024])),
    dtypes=st.sampled_from(DTYPES),
    upstream=st.booleans(),
    pad=st.sampled_from([0, 1, 8]),
    seed=st.integers(0, 1000),
    centered=st.booleans(),
)
def test_random_shapes(scaled, rows, hidden, dtypes, upstream, pad, seed, centered):
    case = Case(scaled, rows, hidden, *dtypes, upstream, pad, seed=seed, centered=centered)
    for module in (reference, hip_kernels):
        check(of_module(module), case)


@of_all_forms
def test_gradcheck(scaled, centered):
    """Both results, all arguments, in fp64: against finite differences."""
    case = Case(scaled, 3, 7, FP64, FP64, FP64, scale=1.0, centered=centered)
    assert torch.autograd.gradcheck(lambda *arguments: operator(case)(*arguments, 1e-3), leaves(case))


def test_layer_norm_is_torchs():
    """torch.nn.functional.layer_norm and its autograd, fp32: forward and every gradient of a chain of two."""
    i, found = make(Case(False, 12, 96, FP32, FP32, FP32, centered=True, offset=3.0)), []

    def by_torch(x, stream, weight, bias, eps):
        stream = x + stream
        return torch.nn.functional.layer_norm(stream, weight.shape, weight, bias, eps), stream

    for use in (by_torch, hip_ops.add_layer_norm, lambda x, s, *v: (hip_ops.layer_norm(x + s, *v), x + s)):
        x, stream, weight, bias = (t.detach().clone().requires_grad_() for t in i.arguments)
        y, middle = use(x, stream, weight, bias, 1e-5)
        z, last = use(torch.tanh(y), middle, weight, bias, 1e-5)
        (torch.sin(z) + last * i.dy).sum().backward()
        found.append([y, middle, z, last, *(t.grad for t in (x, stream, weight, bias))])
    for other in found[1:]:
        for ours, theirs in zip(other, found[0], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_affine_layer_norm():
    x, bias, scale, weight, norm_bias = (torch.randn(*shape) for shape in ((5, 24), (24,), (24,), (24,), (24,)))
    y, stream = hip_ops.affine_layer_norm(x.bfloat16(), bias, scale, weight, norm_bias, 1e-5, torch.float32)
    assert torch.equal(stream, (x.bfloat16().float() + bias) * scale)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(stream, (24,), weight, norm_bias, 1e-5))


@pytest.mark.parametrize("dtypes", [(FP32, FP32, FP32), (BF16, FP32, BF16)], ids=str)
@pytest.mark.parametrize("shape", [(16, 2, 96), (7, 33)], ids=str)
def test_autograd_over_the_formulas_bit_for_bit(dtypes, shape):
    """Two chained merges as in a layer: forward and all gradients equal those of autograd over the formulas that stand
    alone.
    """

    def by_autograd(output, stream, *vectors):
        *vectors, weight, eps = vectors
        stream = reference.scale_residual(output, stream, *vectors)
        return stream, reference.rms_norm(stream, weight, eps)

    hidden, results = shape[-1], []
    inputs = make(Case(True, 2 * shape[0] * (shape[1] if len(shape) > 2 else 1), hidden, *dtypes, scale=1.0))
    for use in (by_autograd, lambda *a: hip_ops.scaled_residual_rms_norm(*a)[::-1]):
        x, residual, upstream = (t.detach().reshape(2, *shape) for t in (inputs.x, inputs.residual, inputs.dy))
        arguments = [*x.unbind(0), residual[0], *inputs.vectors.values(), *(v.flip(0) for v in inputs.vectors.values())]
        first, second, stream, *vectors = (t.detach().clone().requires_grad_() for t in arguments)
        stream1, y = use(first, stream, *vectors[:5], 1e-5)
        stream2, z = use(second + torch.tanh(y), stream1, *vectors[5:], 1e-5)
        loss = (z * upstream[0]).float().sum() + (stream2 * residual[1]).sum()
        loss.backward()
        results.append([y, z, stream1, stream2, loss, *(t.grad for t in (first, second, stream, *vectors))])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


def test_statistics_are_of_the_stored_residual():
    """1 + 2^-9 rounds to 1 in bf16: y follows the rounded value, in every back end."""
    x, residual = torch.full((1, 16), 2.0**-9, dtype=BF16), torch.ones(1, 16, dtype=BF16)
    for name in ("reference", "hip"):
        with use_kernels(name):
            y, new_residual = hip_ops.add_rms_norm(x, residual, torch.ones(16), 0.0)
            assert torch.equal(new_residual, residual)
            assert torch.equal(y, torch.ones(1, 16))


def test_gradients_of_a_result_that_is_not_used(chosen):
    case = Case(True, 4, 24)
    for used in (0, 1):
        inputs = leaves(case)
        found = operator(case)(*inputs, case.eps)
        found[used].float().sum().backward()
        if used == 1:
            assert torch.equal(inputs[-1].grad, torch.zeros(24, dtype=BF16)), "weight has no part in new_residual"
            compare(
                "d_x",
                inputs[0].grad,
                Exact(inputs[3].detach().double().expand(4, 24), inputs[3].detach().double().abs().expand(4, 24)),
            )
        assert all(t.grad is not None and t.grad.isfinite().all() for t in inputs)


@of_all_forms
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 256)], ids=str)
def test_empty(chosen, scaled, centered, shape):
    case = Case(scaled, 1, shape[-1], centered=centered)
    inputs = leaves(case)
    inputs[0], inputs[1] = (torch.zeros(shape, dtype=t.dtype, requires_grad=True) for t in inputs[:2])
    y, new_residual = operator(case)(*inputs, 1e-5)
    assert y.shape == new_residual.shape == shape and (y.dtype, new_residual.dtype) == (BF16, FP32)
    (y.sum() + new_residual.sum()).backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in inputs)


@of_all_forms
def test_any_strides_give_the_same(chosen, scaled, centered):
    """Transposed, every other column, expanded: the results are those of the copy, and contiguous."""
    hidden = 40
    case = Case(scaled, 1, hidden, centered=centered)
    vectors = list(make(case).arguments[2:])
    generator = torch.Generator().manual_seed(1)
    base, wide = torch.randn(hidden, 3, 5, generator=generator), torch.randn(5, 3, 2 * hidden, generator=generator)
    for x, residual in (
        (base.permute(2, 1, 0), wide[..., ::2]),
        (base[:, 0, 0].expand(5, 3, hidden), wide[..., :hidden]),
    ):
        results = []
        for a, b in ((x, residual), (x.contiguous(), residual.contiguous())):
            a, b = a.bfloat16().detach() if a.is_contiguous() else a.detach().bfloat16(), b.detach()
            a, b = a.requires_grad_(), b.requires_grad_()
            found = operator(case)(a, b, *vectors, 1e-5)
            assert all(t.is_contiguous() for t in found)
            found[0].float().square().sum().backward()
            results.append([*found, a.grad, b.grad])
        assert all(torch.allclose(p, q, rtol=1e-5, atol=1e-6) for p, q in zip(*results, strict=True))


ERRORS = [
    ({"residual": lambda t: t[:1]}, "residual has shape (1, 8). Allowed: (3, 8), [..., h]"),
    ({"weight": lambda t: t[:7]}, "weight has shape (7,). Allowed: (8,), [h]"),
    (
        {"x": lambda t: t.half()},
        "{x} is torch.float16. Allowed: torch.bfloat16 or torch.float32 (or all tensors torch.float64)",
    ),
    ({"residual": lambda t: t.double()}, "residual is torch.float64. Allowed:"),
    ({"residual": lambda t: t.to("meta")}, "residual is on meta. Allowed: on cpu like {x}"),
    ({"x": lambda t: t[:, :0], "residual": lambda t: t[:, :0]}, "{x} has shape (3, 0). Allowed: [..., h>0]"),
    ({"output_scale": lambda t: t.float()}, "output_scale is torch.float32. Allowed: torch.bfloat16 like weight"),
    ({"residual_bias": lambda t: t.reshape(1, 8)}, "residual_bias has shape (1, 8). Allowed: (8,)"),
    ({"bias": lambda t: t.float()}, "bias is torch.float32. Allowed: torch.bfloat16 like weight"),
]


@of_all_forms
@pytest.mark.parametrize("changes, message", ERRORS, ids=[message[:24] for _, message in ERRORS])
def test_wrong_arguments_are_named(scaled, centered, changes, message):
    case = Case(scaled, 3, 8, centered=centered)
    names = ("x", "residual", *(VECTORS if scaled else ("weight",)), *(("bias",) if centered else ()))
    if not changes.keys() <= set(names):
        return
    arguments = dict(zip(names, make(case).arguments, strict=True))
    arguments |= {name: change(arguments[name]) for name, change in changes.items()}
    expected = "hip_ops.merge_norm: " + message.replace("{x}", "output")
    with pytest.raises(ValueError, match="^" + re.escape(expected)):
        operator(case)(*arguments.values(), 1e-5)


@of_all_forms
def test_opcheck(scaled, centered):
    """Schema, fake tensors, autograd registration and AOT dispatch, torch's own checks."""
    for case in (Case(scaled, 3, 16, centered=centered), Case(scaled, 2, 5, FP32, FP32, FP32, centered=centered)):
        inputs = [None if t is None else t.detach().requires_grad_() for t in make(case).operands]
        torch.library.opcheck(torch.ops.hip_ops.merge_norm.default, (*inputs, 1e-5))
        statistics = [torch.rand(case.rows, 1) + 0.5 for _ in range(1 + centered)]
        for i in (make(case), make(replace(case, d_new_residual=False))):
            torch.library.opcheck(
                torch.ops.hip_ops.merge_norm_backward.default,
                backward_arguments(i, i.residual, *statistics),
                test_utils=("test_schema", "test_faketensor"),
            )


@of_all_forms
def test_compiles_whole(chosen, scaled, centered):
    case = Case(scaled, 4, 32, centered=centered)

    def function(*arguments):
        y, new_residual = operator(case)(*arguments, 1e-5)
        return (torch.tanh(y.float()) + new_residual).sum()

    results = []
    for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        inputs = leaves(case)
        loss = run(*inputs)
        loss.backward()
        results.append([loss, *(t.grad for t in inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_the_comparison_knows_one_rounding():
    """The comparison passes half an ULP and refuses the three quarters of a truncation; otherwise the tests above
    could not fail.
    """
    want = Exact(torch.tensor([1.0 + 0.75 / 128], dtype=FP64), torch.tensor([1.0], dtype=FP64))
    compare("rounded", torch.tensor([1.0 + 1 / 128], dtype=BF16), want)
    with pytest.raises(AssertionError, match="0.75 ULP of torch.bfloat16"):
        compare("truncated", torch.tensor([1.0], dtype=BF16), want)
    with pytest.raises(AssertionError, match="1 of 1 elements are wrong"):
        compare("nan", torch.tensor([float("nan")], dtype=BF16), want)
    assert ulp(torch.tensor([1.0, 1.99, 2.0, -4.0]), BF16).tolist() == [2.0**-7, 2.0**-7, 2.0**-6, 2.0**-5]


def test_results_do_not_change_between_runs(monkeypatch):
    """There are no atomics: the bits are the same for every order of blocks and waves."""
    implementation = of_module(hip_kernels)
    for centered in (False, True):
        inputs, found = make(Case(True, 12, 256, centered=centered)), []
        for schedule in ("forward", "reverse", "random:3"):
            monkeypatch.setenv("HO_CPU_SCHEDULE", schedule)
            y, new_residual, *rest = implementation.forward(inputs)
            found.append([y, new_residual, *rest, *implementation.backward(inputs, new_residual, *rest).values()])
        for other in found[1:]:
            assert all(itertools.starmap(torch.equal, zip(found[0], other, strict=True)))


def test_rows_that_are_too_long_for_triton_go_to_the_next_version():
    for name in ("merge_norm", "merge_norm_backward"):
        fits = OPERATORS[name].fits["triton"]
        assert [fits(torch.empty(1, hidden)) for hidden in (32768, 32769)] == [True, False]


def test_the_vectors_of_a_merge_come_together():
    output, residual, *vectors, weight, bias = make(Case(True, 3, 8)).operands
    message = "hip_ops.merge_norm: output_scale is None. Allowed: all four vectors of the merge, or none."
    with pytest.raises(ValueError, match=re.escape(message)):
        torch.ops.hip_ops.merge_norm(output, residual, vectors[0], None, *vectors[2:], weight, bias, 1e-5)
