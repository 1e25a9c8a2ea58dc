# SPDX-License-Identifier: Apache-2.0
"""hip_ops.symmetric_product and matmul_add: on the torch reference and on the HIP source built for this machine's CPU."""

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hip_ops
from tests.hip_ops.cpu_kernels import SCHEDULES
from tests.hip_ops.product_cases import DTYPES, ROUNDED_ONCE, Case, general_case, symmetric_case

module = importlib.import_module("hip_ops.newton_schulz")


def product(case: Case) -> torch.Tensor:
    return hip_ops.symmetric_product(case.a, case.d, alpha=case.alpha, beta=case.beta)


@pytest.fixture(params=["torch", "hip"])
def backend(request):
    with hip_ops.use_backend(request.param):
        yield request.param


def test_self_check_passes_here():
    """Otherwise the operators below would quietly be torch's."""
    operators = [module._symmetric, module._matmul_add, module._newton_schulz]
    with hip_ops.use_backend("hip"):
        assert set(hip_ops.warm_up("cpu", operators).values()) == {"passed"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch, n, k", [(1, 1, 1), (3, 17, 256), (1, 256, 40), (2, 136, 72), (1, 65, 33)])
def test_one_rounding_and_exact_symmetry(backend, dtype, batch, n, k):
    case = symmetric_case(batch, n, k, dtype)
    got = product(case)
    assert torch.equal(got, got.mT) and got.is_contiguous() and got.dtype == DTYPES[dtype]
    assert case.worst_ulps(got) <= ROUNDED_ONCE


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tile", [64, 128])
def test_hip_source_under_three_schedules(monkeypatch, schedule, tile):
    from hip_ops.hip_kernels import newton_schulz as native

    monkeypatch.setenv("HO_CPU_SCHEDULE", schedule)
    case = symmetric_case(2, 200, 168, "bf16")
    got = native._symmetric(case.a, case.a, case.d, case.alpha, case.beta, tile)
    assert torch.equal(got, got.mT) and case.worst_ulps(got) <= ROUNDED_ONCE
    case = general_case(1, 136, 200, 168, "bf16")
    turned = torch.empty((1, 200, 136), dtype=torch.bfloat16)
    got = native._general(case.a, case.b, case.d, case.alpha, case.beta, transposed=turned, tile=tile)
    assert torch.equal(turned, got.mT) and case.worst_ulps(got) <= ROUNDED_ONCE


def test_half_operands_with_bf16_result_round_once(monkeypatch):
    from hip_ops.hip_kernels import newton_schulz as native

    case = general_case(1, 72, 40, 104, "fp16")
    got = native._general(case.a, case.b, case.d, case.alpha, case.beta, dtype=torch.bfloat16)
    assert got.dtype == torch.bfloat16 and case.worst_ulps(got) <= ROUNDED_ONCE


def test_launcher_has_no_variant_for_other_tiles():
    from hip_ops.hip_kernels import newton_schulz as native

    case = symmetric_case(1, 8, 8, "bf16")
    with pytest.raises(RuntimeError, match="ho_symmetric_product has no variant"):
        native._symmetric(case.a, case.a, None, 1.0, 0.0, tile=96)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    batch=st.lists(st.integers(1, 3), max_size=2),
    n=st.integers(1, 150),
    k=st.integers(1, 90),
    dtype=st.sampled_from(list(DTYPES)),
    with_b=st.booleans(),
    layout=st.sampled_from(["rows", "columns", "strided"]),
    alpha=st.floats(-2, 2),
    beta=st.floats(-2, 2),
)
def test_any_shape_and_stride_in_hip(batch, n, k, dtype, with_b, layout, alpha, beta):
    count = 1
    for extent in batch:
        count *= extent
    case = symmetric_case(count, n, k, dtype, with_d=with_b)
    case.alpha, case.beta = alpha, beta
    a = case.a
    if layout == "columns":
        a = a.mT.contiguous().mT
    elif layout == "strided":
        a = torch.full((count, n + 1, 2 * k), float("nan"), dtype=a.dtype)[:, :n, ::2].copy_(a)
    with hip_ops.use_backend("hip"):
        got = hip_ops.symmetric_product(
            a.view(*batch, n, k) if layout == "rows" else a,
            case.d if not with_b or layout != "rows" else case.d.view(*batch, n, n),
            alpha=alpha,
            beta=beta,
        )
    assert torch.equal(got, got.mT)
    assert case.worst_ulps(got.reshape(count, n, n)) <= ROUNDED_ONCE


def test_matmul_add(backend):
    case = general_case(2, 40, 104, 72, "bf16")
    got = module.matmul_add(case.a, case.b.mT, case.d, alpha=case.alpha, beta=case.beta)
    assert case.worst_ulps(got) <= ROUNDED_ONCE
    case.d = None
    assert case.worst_ulps(module.matmul_add(case.a, case.b.mT, alpha=case.alpha)) <= ROUNDED_ONCE


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 3, 0)])
@pytest.mark.parametrize("with_b", [False, True])
def test_empty(backend, shape, with_b):
    a = torch.ones(shape, dtype=torch.bfloat16)
    b = torch.full((shape[0], shape[1], shape[1]), 3.0, dtype=torch.bfloat16) if with_b else None
    got = hip_ops.symmetric_product(a, b, beta=2.0)
    assert got.shape == (shape[0], shape[1], shape[1])
    assert torch.equal(got, torch.full_like(got, 6.0 if with_b else 0.0))


def test_gradients():
    torch.manual_seed(0)
    a, b = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True), torch.randn(2, 4, 4, dtype=torch.float64)
    b = (b + b.mT).requires_grad_()
    assert torch.autograd.gradcheck(lambda a: hip_ops.symmetric_product(a, alpha=1.3), (a,))
    # b is symmetric, so only symmetric changes of it have a derivative.
    assert torch.autograd.gradcheck(lambda a, b: hip_ops.symmetric_product(a, b + b.mT, alpha=1.3, beta=-0.7), (a, b))
    c, d = (
        torch.randn(2, 3, 5, dtype=torch.float64, requires_grad=True),
        torch.randn(2, 4, 5, dtype=torch.float64, requires_grad=True),
    )
    assert torch.autograd.gradcheck(lambda a, c, d: module.matmul_add(a, c, d, alpha=1.3, beta=-0.7), (a, c, d))


def test_registered_operators():
    case = symmetric_case(2, 5, 3, "bf16")
    for arguments in ((case.a.float().requires_grad_(), case.d.float(), 1.5, 0.5), (case.a, None, 1.0, 0.0)):
        torch.library.opcheck(module._symmetric_op, arguments)
    torch.library.opcheck(module._matmul_op, (case.d.float(), case.a.float().requires_grad_(), None, 1.5, 0.0))


@pytest.mark.parametrize(
    "a, b, message",
    [
        (torch.ones(3), None, r"a has shape \(3,\)"),
        (torch.ones(3, 2, dtype=torch.int32), None, "a is torch.int32"),
        (torch.ones(3, 2), torch.ones(3, 2), r"b is torch.float32 \(3, 2\) .* must be torch.float32 \(3, 3\)"),
        (torch.ones(3, 2), torch.ones(3, 3).bfloat16(), "b is torch.bfloat16"),
    ],
)
def test_errors_name_argument_and_what_is_allowed(a, b, message):
    with pytest.raises(ValueError, match=f"hip_ops.symmetric_product: {message}"):
        hip_ops.symmetric_product(a, b)
    with pytest.raises(ValueError, match=r"hip_ops.matmul_add: b is .* must be torch.float32 \(2, 4\)"):
        module.matmul_add(torch.ones(3, 2), torch.ones(3, 4))
