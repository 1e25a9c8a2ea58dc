# SPDX-License-Identifier: Apache-2.0
"""SwiGLU with the routing weight as an operator, on the CPU: the torch reference, and the HIP source built with g++."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import hip_ops
from hip_ops import saved_bytes
from hip_ops.ops.weighted_swiglu import hip as hip_kernels
from hip_ops.ops.weighted_swiglu import reference
from tests.hip_ops.cpu_kernels import SCHEDULES
from tests.hip_ops.expert_path_cases import BF16, FP32, FP64, Swiglu, check_swiglu

CASES = [
    Swiglu(9, 2048),
    Swiglu(9, 4096),
    Swiglu(140, 256, offsets="none"),
    Swiglu(5, 512, BF16, BF16, pad=8),
    Swiglu(5, 512, pad=3),
    Swiglu(4, 2051),
    Swiglu(6, 45),
    Swiglu(7, 1, offsets="all"),
    Swiglu(6, 260, FP32),
    Swiglu(5, 1028, FP32, BF16, offsets="no_expert"),
    Swiglu(6, 33, FP32, pad=1),
    Swiglu(5, 64, scale=12.0),
    Swiglu(5, 64, FP32, scale=12.0),
    Swiglu(0, 8, offsets="none"),
    Swiglu(1, 4100),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_build_against_fp64(monkeypatch, case, schedule):
    monkeypatch.setenv("HO_CPU_SCHEDULE", schedule)
    check_swiglu(hip_kernels, case)


@pytest.mark.parametrize("case", [*CASES, Swiglu(7, 9, FP64, FP64)], ids=str)
def test_reference_against_fp64(case):
    check_swiglu(reference, case)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(0, 20),
    width=st.one_of(st.integers(1, 300), st.sampled_from([8, 512, 2048])),
    offsets=st.sampled_from(["none", "all", "some", "no_expert"]),
    dtypes=st.sampled_from([(BF16, FP32), (BF16, BF16), (FP32, FP32), (FP32, BF16)]),
    pad=st.sampled_from([0, 1, 8]),
    seed=st.integers(0, 1000),
)
def test_random_shapes(rows, width, offsets, dtypes, pad, seed):
    for module in (reference, hip_kernels):
        check_swiglu(module, Swiglu(rows, width, *dtypes, "none" if rows == 0 else offsets, pad, seed=seed))


@pytest.mark.parametrize("live", [None, 5, 3, 0])
def test_gradcheck(live):
    gate_up, probs = torch.randn(5, 14, dtype=FP64, requires_grad=True), torch.rand(5, dtype=FP64, requires_grad=True)
    offsets = None if live is None else torch.tensor([live // 2, live], dtype=torch.int32)
    assert torch.autograd.gradcheck(lambda g, p: hip_ops.weighted_swiglu(g, p, offsets), (gate_up, probs))


def test_autograd_gives_what_the_backward_function_gives(chosen):
    gate_up, probs = torch.randn(6, 64).bfloat16().requires_grad_(), torch.rand(6).requires_grad_()
    offsets, grad = torch.tensor([2, 4], dtype=torch.int32), torch.randn(6, 32).bfloat16()
    output = hip_ops.weighted_swiglu(gate_up, probs, offsets)
    by_autograd = torch.autograd.grad(output, (gate_up, probs), grad)
    d_gate_up, d_probs, again = hip_ops.weighted_swiglu_backward(grad, gate_up.detach(), probs.detach(), offsets)
    assert torch.equal(by_autograd[0], d_gate_up) and torch.equal(by_autograd[1], d_probs)
    torch.testing.assert_close(again, output.detach(), rtol=2**-7, atol=0)
    assert (
        hip_ops.weighted_swiglu_backward(grad, gate_up.detach(), probs.detach(), offsets, with_output=False)[2] is None
    )
    assert not output[4:].any() and not d_gate_up[4:].any() and not d_probs[4:].any()


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38, -3e38, 1e4, -1e4, -88.0, -90.0])
def test_extreme_gates(chosen, value):
    """As torch: what overflows or is no number there is none in the result, and a gate far below zero gives zero."""
    gate_up = torch.tensor([[value, 2.0], [1.0, 2.0]])
    output = hip_ops.weighted_swiglu(gate_up, torch.ones(2))
    want = torch.nn.functional.silu(gate_up[:, :1]) * gate_up[:, 1:]
    torch.testing.assert_close(output, want, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_any_strides_give_the_same(chosen):
    probs = torch.rand(12)
    for gate_up in (
        torch.randn(16, 12).t(),
        torch.randn(12, 32)[:, ::2],
        torch.randn(1, 16).expand(12, 16),
        torch.randn(12, 20)[:, 3:19],
    ):
        grad = torch.randn(1, 8).expand(12, 8)
        for a, b in zip(
            hip_ops.weighted_swiglu_backward(grad, gate_up, probs),
            hip_ops.weighted_swiglu_backward(grad.contiguous(), gate_up.contiguous(), probs),
            strict=True,
        ):
            # sums of rows that are not aligned run in another order
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
            assert a.is_contiguous()


def test_the_registered_operator_keeps_torchs_rules(chosen):
    gate_up, probs = torch.randn(9, 8, requires_grad=True), torch.rand(9, requires_grad=True)
    for offsets in (None, torch.tensor([3, 7], dtype=torch.int32)):
        torch.library.opcheck(torch.ops.hip_ops.weighted_swiglu.default, (gate_up, probs, offsets))
        torch.library.opcheck(
            torch.ops.hip_ops.weighted_swiglu_backward.default,
            (torch.randn(9, 4), gate_up.detach(), probs.detach(), offsets, True),
        )


@pytest.mark.parametrize(
    "call, says",
    [
        (
            lambda: hip_ops.weighted_swiglu(torch.zeros(3, 5), torch.zeros(3)),
            "gate_up has 5 columns. Allowed: [n, 2 f], gate and up",
        ),
        (
            lambda: hip_ops.weighted_swiglu(torch.zeros(3, 0), torch.zeros(3)),
            "gate_up has shape (3, 0). Allowed: [n, columns>0]",
        ),
        (
            lambda: hip_ops.weighted_swiglu(torch.zeros(3, 4), torch.zeros(3), torch.zeros(0, dtype=torch.int32)),
            "offsets has shape (0,). Allowed: [experts>0]",
        ),
        (
            lambda: hip_ops.weighted_swiglu(torch.zeros(3, 4), torch.zeros(2)),
            "probs has shape (2,). Allowed: (3,), [n]",
        ),
        (
            lambda: hip_ops.weighted_swiglu(torch.zeros(3, 4), torch.zeros(3), torch.zeros(2)),
            "offsets is torch.float32. Allowed: torch.int32",
        ),
        (
            lambda: hip_ops.weighted_swiglu(torch.zeros(3, 4, dtype=torch.float16), torch.zeros(3)),
            "gate_up is torch.float16. Allowed: torch.bfloat16 or torch.float32",
        ),
        (
            lambda: hip_ops.weighted_swiglu(torch.zeros(3, 4, dtype=FP64), torch.zeros(3)),
            "probs is torch.float32. Allowed: torch.float64",
        ),
        (
            lambda: hip_ops.weighted_swiglu(torch.zeros(3, 4, device="meta"), torch.zeros(3)),
            "probs is on cpu. Allowed: on meta like gate_up",
        ),
        (
            lambda: hip_ops.weighted_swiglu_backward(torch.zeros(3, 3), torch.zeros(3, 4), torch.zeros(3)),
            "grad has shape (3, 3). Allowed: (3, 2), [n, columns//2]",
        ),
        (
            lambda: hip_ops.weighted_swiglu_backward(torch.zeros(3, 2, dtype=BF16), torch.zeros(3, 4), torch.zeros(3)),
            "grad is torch.bfloat16. Allowed: torch.float32 like gate_up",
        ),
    ],
)
def test_errors_name_what_is_wrong(call, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        call()


def test_saved_bytes():
    """What is declared for plans of memory, against what autograd holds."""
    gate_up, probs = torch.randn(6, 64).bfloat16().requires_grad_(), torch.rand(6)
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        hip_ops.weighted_swiglu(gate_up, probs, torch.tensor([2, 4], dtype=torch.int32))
    assert sorted(t.nbytes for t in held) == sorted(saved_bytes.weighted_swiglu(6, 32, 2, 2).values())
