# SPDX-License-Identifier: Apache-2.0
"""Experts against a loop over tokens; skipped rows and experts without rows; the block of memory under the weights."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from zaya_plugin.model import grouped_gemm
from zaya_plugin.model.experts import ExpertMLP, GroupedExperts, as_block, swiglu, swiglu_backward
from zaya_plugin.model.grouped_gemm_implementations import has_grouped_mm
from zaya_plugin.model.moe import PermuteRows, sort_by_expert

COUNTS = {"even": [2, 2, 2], "odd": [1, 3, 2], "empty_expert": [0, 5, 0], "skipped": [1, 0, 2], "nothing": [0, 0, 0]}
ROWS, H, FFN, E = 7, 5, 3, 3


def make(dtype=torch.float64, rows=ROWS, h=H, f=FFN, num_experts=E):
    x = torch.randn(rows, h, dtype=dtype, requires_grad=True)
    weights = torch.rand(rows, dtype=dtype, requires_grad=True)
    fc1 = [torch.randn(2 * f, h, dtype=dtype, requires_grad=True) for _ in range(num_experts)]
    fc2 = [torch.randn(h, f, dtype=dtype, requires_grad=True) for _ in range(num_experts)]
    return x, weights, fc1, fc2


def offsets_of(counts):
    return torch.tensor(counts).cumsum(0).int()


def loop(x, weights, offsets, fc1, fc2):
    rows = []
    ends = offsets.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise([0, *ends])):
        gate, up = (x[start:end] @ fc1[expert].T).chunk(2, dim=-1)
        rows.append((F.silu(gate) * up @ fc2[expert].T) * weights[start:end, None])
    return torch.cat([*rows, torch.zeros_like(x[ends[-1] :])])


@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_gradcheck_in_fp64(counts):
    x, weights, fc1, fc2 = make()
    offsets = offsets_of(counts)
    assert torch.autograd.gradcheck(
        lambda x, w, *m: ExpertMLP.apply(x, w, offsets, E, False, "auto", None, *m), (x, weights, *fc1, *fc2)
    )


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_values_and_gradients_equal_the_loop(counts, dtype, tolerance):
    x, weights, fc1, fc2 = make(dtype, h=8, f=16)
    assert has_grouped_mm(x)
    offsets, leaves = offsets_of(counts), [x, weights, *fc1, *fc2]
    y = ExpertMLP.apply(x, weights, offsets, E, False, "auto", None, *fc1, *fc2)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = loop(exact[0], exact[1], offsets, exact[2 : 2 + E], exact[2 + E :])
    g = torch.randn_like(y)
    gradients = torch.autograd.grad(y, leaves, g)
    wanted = torch.autograd.grad(expected, exact, g.double(), allow_unused=True, materialize_grads=True)
    for got, want in zip([y, *gradients], [expected, *wanted], strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).norm() <= tolerance * want.norm()
        assert not got[want == 0].any()  # exact zeros, and no NaN in them


def test_rows_of_no_expert_ignore_what_lies_in_memory(monkeypatch):
    """grouped_mm leaves those rows uninitialised; here they hold NaN for certain."""
    offsets, honest = offsets_of([2, 0, 1]), grouped_gemm.grouped_rows

    def poisoned(x, matrices, offsets, asked):
        out = honest(x, matrices, offsets, asked)
        out[int(offsets[-1]) :] = float("nan")
        return out

    monkeypatch.setattr("zaya_plugin.model.experts.grouped_rows", poisoned)
    x, weights, fc1, fc2 = make(torch.float32)
    leaves = [x, weights, *fc1, *fc2]
    y = ExpertMLP.apply(x, weights, offsets, E, False, "auto", None, *fc1, *fc2)
    gradients = torch.autograd.grad(y, leaves, torch.randn_like(y))
    assert all(t.isfinite().all() for t in (y, *gradients))
    assert not y[3:].any() and not gradients[0][3:].any() and not gradients[1][3:].any()
    assert not gradients[3].any() and not gradients[3 + E].any()  # expert 1 has no rows


def test_loop_equals_grouped_gemm(monkeypatch):
    x, weights, fc1, fc2 = make(torch.float32, rows=11, h=8, f=16)
    leaves, offsets = [x, weights, *fc1, *fc2], offsets_of([4, 0, 6])
    results = []
    for available in (True, False):
        if not available:
            monkeypatch.setattr(grouped_gemm, "choices", lambda *what: ())
        y = ExpertMLP.apply(x, weights, offsets, E, False, "auto", None, *fc1, *fc2)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


def test_swiglu_backward_returns_the_forward():
    gate_up, weights = torch.randn(6, 10), torch.rand(6)
    *_, again = swiglu_backward(torch.randn(6, 5), gate_up, weights)
    torch.testing.assert_close(again, swiglu(gate_up, weights))
    assert gate_up.shape == (6, 10)


@pytest.mark.parametrize("num_experts", [1, 4, 16])
def test_sort_by_expert(num_experts):
    ids = torch.randint(0, num_experts + 1, (50,))
    order, inverse, offsets = sort_by_expert(ids, num_experts)
    assert torch.equal(ids[order], ids.sort().values) and torch.equal(order[inverse], torch.arange(50))
    assert torch.equal(offsets, torch.bincount(ids, minlength=num_experts + 1)[:-1].cumsum(0).int())
    assert offsets.dtype == torch.int32
    x = torch.randn(50, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: PermuteRows.apply(x, order, inverse), x)
    assert torch.equal(PermuteRows.apply(PermuteRows.apply(x, order, inverse), inverse, order), x)


@pytest.fixture
def experts(make_config):
    return GroupedExperts(4, make_config())


def is_block(module):
    groups = [module.linear_fc1.matrices(), module.linear_fc2.matrices()]
    return all(as_block(matrices).data_ptr() == matrices[0].data_ptr() for matrices in groups)


def test_weights_are_one_block_and_stay_one(experts):
    assert is_block(experts)
    before = [w.clone() for w in experts.linear_fc1.matrices()]
    experts.bfloat16()
    assert is_block(experts) and experts.linear_fc1.weight0.dtype == torch.bfloat16
    experts.float()
    assert is_block(experts)
    for weight, old in zip(experts.linear_fc1.matrices(), before, strict=True):
        assert torch.equal(weight, old.bfloat16().float())


def test_names_shapes_and_reversed_registration(experts):
    names = [name for name, _ in experts.named_parameters()]
    expected = [f"linear_fc{i}.weight{e}" for i in (1, 2) for e in (3, 2, 1, 0)]
    assert names == expected
    assert experts.linear_fc1.weight0.shape == (48, 32) and experts.linear_fc2.weight0.shape == (32, 24)
    experts.set_layer_number(3)
    assert experts.linear_fc2.weight2.expert_block == ("layers.2.linear_fc2", 2)


def test_scattered_weights_give_the_same_results(experts):
    x, weights, offsets = torch.randn(9, 32), torch.rand(9), torch.tensor([2, 2, 5, 8], dtype=torch.int32)
    scattered = GroupedExperts(4, experts.config)
    for p, q in zip(scattered.parameters(), experts.parameters(), strict=True):
        p.data = q.data.clone()
    assert not is_block(scattered)
    y, z = experts(x, weights, offsets), scattered(x, weights, offsets)
    assert torch.equal(y, z)
    y.sum().backward()
    z.sum().backward()
    for (name, p), q in zip(experts.named_parameters(), scattered.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    block = as_block([w.grad for w in experts.linear_fc1.matrices()])
    assert block.data_ptr() == experts.linear_fc1.weight0.grad.data_ptr()  # gradients are one block as well


def test_weights_in_a_flat_buffer_are_read_in_place(experts):
    """Megatron's DDP points .data into its buffer, in reverse order of registration."""
    parameters = list(experts.parameters())
    buffer = torch.empty(sum(p.numel() for p in parameters))
    start = 0
    for p in reversed(parameters):
        view = buffer[start : start + p.numel()].view_as(p)
        view.copy_(p.data)
        p.data = view
        start += p.numel()
    assert is_block(experts)
    assert as_block(experts.linear_fc2.matrices()).data_ptr() == buffer.data_ptr()


def test_initial_values_are_the_generators(make_config):
    torch.manual_seed(3)
    first = GroupedExperts(4, make_config(init_method_std=0.5, scaled_output_init=True))
    torch.manual_seed(3)
    second = GroupedExperts(4, make_config(init_method_std=0.5, scaled_output_init=True))
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))
    assert 0.45 < as_block(first.linear_fc1.matrices()).std() < 0.55
    assert 0.45 < as_block(first.linear_fc2.matrices()).std() * (2 * 4) ** 0.5 < 0.55
