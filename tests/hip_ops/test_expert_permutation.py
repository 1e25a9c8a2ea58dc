# SPDX-License-Identifier: Apache-2.0
"""Sort by expert, permute and unpermute as operators, on the CPU: the torch reference, and the HIP sources built with
g++.
"""

import re

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hip_ops
from hip_ops import saved_bytes
from hip_ops.ops.expert_permutation import ExpertOrder, reference
from hip_ops.ops.expert_permutation import hip as hip_kernels
from tests.hip_ops.cpu_kernels import SCHEDULES
from tests.hip_ops.expert_path_cases import BF16, FP32, FP64, MIXES, Rows, check_rows, check_sort, expert_ids

MODULES = {"reference": reference, "hip": hip_kernels}
ROWS = [
    Rows(9, 2048),
    Rows(40, 4096, num_experts=24),
    Rows(140, 256, mix="skewed", pad=8),
    Rows(5, 512, pad=3),
    Rows(7, 2051),
    Rows(6, 45, BF16, BF16),
    Rows(7, 1, mix="one"),
    Rows(5, 1028, FP32, BF16, mix="no_expert"),
    Rows(130, 36, FP32),
    Rows(6, 33, FP32, pad=1),
    Rows(0, 8),
    Rows(1, 5000),
]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", MODULES)
def test_sort(monkeypatch, name, schedule):
    monkeypatch.setenv("HO_CPU_SCHEDULE", schedule)
    for mix in MIXES:
        check_sort(MODULES[name], expert_ids(mix, 1300, 16), 16)  # two blocks and a thread with no token
    for tokens, num_experts in ((0, 3), (1, 1), (257, 32), (300, 33), (130, 256), (64, 2)):
        check_sort(MODULES[name], expert_ids("even", tokens, num_experts, torch.int32), num_experts)


@pytest.mark.slow
@pytest.mark.parametrize("tokens, num_experts", [(40000, 16), (9000, 256)])
def test_sort_with_several_tokens_a_thread(tokens, num_experts):
    check_sort(hip_kernels, expert_ids("skewed", tokens, num_experts), num_experts)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", ROWS, ids=str)
def test_cpu_build_moves_rows(monkeypatch, case, schedule):
    monkeypatch.setenv("HO_CPU_SCHEDULE", schedule)
    check_rows(hip_kernels, case)


@pytest.mark.parametrize("case", [*ROWS, Rows(9, 40, FP64, FP64, mix="skewed")], ids=str)
def test_reference_moves_rows(case):
    check_rows(reference, case)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tokens=st.integers(0, 40),
    hidden=st.one_of(st.integers(1, 300), st.sampled_from([8, 512, 2048])),
    mix=st.sampled_from(MIXES),
    dtypes=st.sampled_from([(BF16, FP32), (BF16, BF16), (FP32, FP32), (FP32, BF16)]),
    num_experts=st.integers(1, 40),
    pad=st.sampled_from([0, 1, 8]),
    seed=st.integers(0, 1000),
)
def test_random_shapes(tokens, hidden, mix, dtypes, num_experts, pad, seed):
    for module in MODULES.values():
        check_sort(module, expert_ids(mix, 7 * tokens, num_experts, seed=seed), num_experts)
        check_rows(module, Rows(tokens, hidden, *dtypes, mix, num_experts, pad, seed))


@pytest.mark.parametrize("mix", MIXES)
def test_gradcheck(mix):
    """In fp64: first derivatives of both directions, and second ones of rows with their probs."""
    order = hip_ops.sort_by_expert(expert_ids(mix, 7, 3), 3)
    tokens, probs = torch.randn(7, 5, dtype=FP64, requires_grad=True), torch.rand(7, dtype=FP64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t, p: hip_ops.permute_to_experts(t, order, p), (tokens, probs))
    assert torch.autograd.gradgradcheck(lambda t, p: hip_ops.permute_to_experts(t, order, p), (tokens, probs))
    assert torch.autograd.gradcheck(lambda t: hip_ops.permute_to_experts(t, order)[0], tokens)
    assert torch.autograd.gradcheck(lambda t: hip_ops.unpermute_from_experts(t, order), tokens)


def test_there_and_back(chosen):
    """The identity for tokens of experts, zeros for the others, for any content of the padding rows; the same for
    gradients.
    """
    ids = expert_ids("even", 50, 4)
    order = hip_ops.sort_by_expert(ids, 4)
    tokens = torch.randn(50, 24).bfloat16().requires_grad_()
    rows, none = hip_ops.permute_to_experts(tokens, order)
    assert none is None and rows.is_contiguous()
    garbage = rows.detach().clone()
    garbage[order.offsets[-1] :] = float("nan")
    back, upstream = hip_ops.unpermute_from_experts(garbage, order), torch.randn(50, 24).bfloat16()
    want = tokens.detach().masked_fill((ids >= 4)[:, None], 0.0)
    assert torch.equal(back, want) and 0 < int(order.offsets[-1]) < 50
    hip_ops.unpermute_from_experts(rows, order).backward(upstream)
    assert torch.equal(tokens.grad, upstream.masked_fill((ids >= 4)[:, None], 0.0))
    assert torch.equal(order.counts, torch.bincount(ids, minlength=5)[:4].int())


@pytest.mark.parametrize("used", ["rows", "probs"])
def test_gradients_where_one_result_is_not_used(chosen, used):
    ids = expert_ids("even", 20, 3)
    order = hip_ops.sort_by_expert(ids, 3)
    tokens, probs = torch.randn(20, 8).requires_grad_(), torch.rand(20).requires_grad_()
    rows, row_probs = hip_ops.permute_to_experts(tokens, order, probs)
    live = (ids < 3).float()
    if used == "rows":
        rows.sum().backward()
        assert probs.grad is None and torch.equal(tokens.grad, live[:, None].expand(20, 8))
    else:
        row_probs.sum().backward()
        assert tokens.grad is None and torch.equal(probs.grad, live)


def test_any_strides_give_the_same(chosen):
    order = hip_ops.sort_by_expert(expert_ids("even", 12, 3), 3)
    for tokens in (
        torch.randn(16, 12).t(),
        torch.randn(12, 32)[:, ::2],
        torch.randn(1, 16).expand(12, 16),
        torch.randn(12, 20)[:, 3:19],
    ):
        for results in zip(
            *(
                [*hip_ops.permute_to_experts(t, order), hip_ops.unpermute_from_experts(t, order)]
                for t in (tokens, tokens.contiguous())
            ),
            strict=True,
        ):
            if results[0] is not None:
                assert torch.equal(*results) and results[0].is_contiguous()
    ids = torch.arange(24) % 5
    assert all(
        torch.equal(a, b)
        for a, b in zip(hip_ops.sort_by_expert(ids[::2], 3), hip_ops.sort_by_expert(ids[::2].clone(), 3), strict=True)
    )


def test_shapes_without_running():
    """Fake tensors: what torch.compile sees."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        order = hip_ops.sort_by_expert(torch.zeros(7, dtype=torch.int64), 3)
        assert [t.shape[0] for t in order] == [7, 7, 3, 3] and {t.dtype for t in order} == {torch.int32}
        rows, probs = hip_ops.permute_to_experts(torch.zeros(7, 4, dtype=BF16), order, torch.zeros(7))
        assert (rows.shape, rows.dtype, probs.shape, probs.dtype) == ((7, 4), BF16, (7,), FP32)
        assert hip_ops.unpermute_from_experts(rows, order).shape == (7, 4)


def test_the_registered_operators_keep_torchs_rules(chosen):
    order = hip_ops.sort_by_expert(expert_ids("even", 9, 3), 3)
    rows, probs = torch.randn(9, 8, requires_grad=True), torch.rand(9, requires_grad=True)
    maps = (order.token_of_row, order.row_of_token)
    torch.library.opcheck(torch.ops.hip_ops.sort_by_expert.default, (expert_ids("even", 9, 3), 3))
    for side in (None, probs):
        torch.library.opcheck(torch.ops.hip_ops.gather_rows.default, (rows, *maps, side))


ORDER = reference.sort_by_expert(torch.tensor([1, 0, 3]), 2)


@pytest.mark.parametrize(
    "call, says",
    [
        (
            lambda: hip_ops.sort_by_expert(torch.zeros(2, 2, dtype=torch.int64), 3),
            "sort_by_expert: expert_ids has shape (2, 2). Allowed: [n]",
        ),
        (
            lambda: hip_ops.sort_by_expert(torch.zeros(2), 3),
            "expert_ids is torch.float32. Allowed: torch.int32 or torch.int64",
        ),
        (
            lambda: hip_ops.sort_by_expert(torch.zeros(2, dtype=torch.int64), 0),
            "sort_by_expert: num_experts is 0. Allowed: at least 1",
        ),
        (
            lambda: hip_ops.permute_to_experts(torch.zeros(3), ExpertOrder(*ORDER)),
            "gather_rows: rows has shape (3,). Allowed: [n, h]",
        ),
        (
            lambda: hip_ops.permute_to_experts(torch.zeros(4, 2), ExpertOrder(*ORDER)),
            "gather_rows: index has shape (3,). Allowed: (4,), [n]",
        ),
        (
            lambda: hip_ops.permute_to_experts(torch.zeros(3, 2), ExpertOrder(*ORDER), torch.zeros(2)),
            "gather_rows: probs has shape (2,). Allowed: (3,), [n]",
        ),
        (
            lambda: hip_ops.permute_to_experts(torch.zeros(3, 2, dtype=torch.float16), ExpertOrder(*ORDER)),
            "rows is torch.float16. Allowed: torch.bfloat16 or torch.float32",
        ),
        (
            lambda: hip_ops.permute_to_experts(torch.zeros(3, 2), ExpertOrder(*(t.long() for t in ORDER))),
            "index is torch.int64. Allowed: torch.int32",
        ),
        (
            lambda: hip_ops.permute_to_experts(torch.zeros(3, 2, device="meta"), ExpertOrder(*ORDER)),
            "index is on cpu. Allowed: on meta like rows",
        ),
        (
            lambda: hip_ops.permute_to_experts(torch.zeros(3, 2), ExpertOrder(*ORDER), torch.zeros(3, dtype=FP64)),
            "probs is torch.float64. Allowed: torch.bfloat16 or torch.float32 (or all tensors torch.float64)",
        ),
    ],
)
def test_errors_name_what_is_wrong(call, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        call()


def test_more_experts_than_the_kernels_take(chosen):
    """The reference computes them."""
    check_sort(hip_ops, expert_ids("even", 700, 257), 257)


def test_saved_bytes():
    """What is declared for plans of memory, against what autograd holds."""
    order = hip_ops.sort_by_expert(expert_ids("even", 20, 3), 3)
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t):
        rows, _ = hip_ops.permute_to_experts(torch.randn(20, 8, requires_grad=True), order, torch.rand(20))
        hip_ops.unpermute_from_experts(rows, order)
    assert sum({t.data_ptr(): t.nbytes for t in held}.values()) == sum(saved_bytes.expert_permutation(20).values())
