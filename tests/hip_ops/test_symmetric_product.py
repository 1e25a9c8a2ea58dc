# SPDX-License-Identifier: Apache-2.0
"""The products of hip_ops/ops/newton_schulz/symmetric_product.hip, built for this machine's CPU: rounding, symmetry,
shapes, schedules.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hip_ops.ops.newton_schulz import hip as native
from tests.hip_ops.cpu_kernels import SCHEDULES
from tests.hip_ops.product_cases import DTYPES, ROUNDED_ONCE, Case, general_case, symmetric_case


def product(case: Case, **named) -> torch.Tensor:
    return native._symmetric(case.a, case.a, case.d, case.alpha, case.beta, **named)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch, n, k", [(1, 1, 1), (3, 17, 256), (1, 256, 40), (2, 136, 72), (1, 65, 33)])
def test_one_rounding_and_exact_symmetry(dtype, batch, n, k):
    case = symmetric_case(batch, n, k, dtype)
    got = product(case)
    assert torch.equal(got, got.mT) and got.is_contiguous() and got.dtype == DTYPES[dtype]
    assert case.worst_ulps(got) <= ROUNDED_ONCE


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("tile", [64, 128, 256])
def test_hip_source_under_three_schedules(monkeypatch, schedule, tile):
    monkeypatch.setenv("HO_CPU_SCHEDULE", schedule)
    case = symmetric_case(2, 200 if tile < 256 else 264, 168, "bf16")
    got = product(case, tile=tile)
    assert torch.equal(got, got.mT) and case.worst_ulps(got) <= ROUNDED_ONCE
    case = general_case(1, 136, 200, 168, "bf16")
    turned = torch.empty((1, 200, 136), dtype=torch.bfloat16)
    got = native._general(case.a, case.b, case.d, case.alpha, case.beta, transposed=turned, tile=tile)
    assert torch.equal(turned, got.mT) and case.worst_ulps(got) <= ROUNDED_ONCE


def test_half_operands_with_bf16_result_round_once():
    case = general_case(1, 72, 40, 104, "fp16")
    got = native._general(case.a, case.b, case.d, case.alpha, case.beta, dtype=torch.bfloat16)
    assert got.dtype == torch.bfloat16 and case.worst_ulps(got) <= ROUNDED_ONCE


def test_launcher_has_no_variant_for_other_tiles():
    with pytest.raises(RuntimeError, match="ho_symmetric_product has no variant"):
        product(symmetric_case(1, 8, 8, "bf16"), tile=96)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    batch=st.integers(1, 9),
    n=st.integers(1, 150),
    k=st.integers(1, 90),
    dtype=st.sampled_from(list(DTYPES)),
    with_d=st.booleans(),
    alpha=st.floats(-2, 2),
    beta=st.floats(-2, 2),
)
def test_any_shape(batch, n, k, dtype, with_d, alpha, beta):
    case = symmetric_case(batch, n, k, dtype, with_d=with_d)
    case.alpha, case.beta = alpha, beta
    got = product(case)
    assert torch.equal(got, got.mT)
    assert case.worst_ulps(got) <= ROUNDED_ONCE


@pytest.mark.parametrize("with_d", [True, False])
def test_general_product(with_d):
    case = general_case(2, 40, 104, 72, "bf16", with_d=with_d)
    assert case.worst_ulps(native._general(case.a, case.b, case.d, case.alpha, case.beta)) <= ROUNDED_ONCE
