# SPDX-License-Identifier: Apache-2.0
"""Experts against a loop; padding rows and experts without rows; the block of memory under the weights."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import hip_ops
from zaya_plugin.model.experts import ExpertMLP, GroupedExperts, as_block
from zaya_plugin.optim.parameter_role import role_of

COUNTS = {"even": [2, 2, 2], "odd": [1, 3, 2], "empty_expert": [0, 5, 0], "skipped": [1, 0, 2], "nothing": [0, 0, 0]}
UNEVEN = [name for name in COUNTS if name != "even"]
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


@pytest.mark.parametrize("counts", [COUNTS[name] for name in UNEVEN], ids=UNEVEN)
def test_gradcheck_in_fp64(counts):
    """The gradients of the experts' rows agree with finite differences in fp64. Padding rows have no defined result;
    this test sets them to zero.
    """
    x, weights, fc1, fc2 = make()
    offsets = offsets_of(counts)

    def function(x, w, *matrices):
        return ExpertMLP.apply(x, w, offsets, E, None, 1.0, *matrices)[: offsets[-1]]

    assert torch.autograd.gradcheck(function, (x, weights, *fc1, *fc2))
    frozen = [matrix.detach() for matrix in (*fc1, *fc2)]
    sides = [size for matrix in (fc1[0], fc2[0]) for size in ((2, matrix.shape[1]), (matrix.shape[0], 2))]
    adapters = [torch.randn(E, *size, dtype=torch.float64, requires_grad=True) for size in sides]

    def adapted(x, w, *adapters):
        return ExpertMLP.apply(x, w, offsets, E, None, 0.7, *frozen, *adapters)[: offsets[-1]]

    assert torch.autograd.gradcheck(adapted, (x, weights, *adapters))


@pytest.mark.parametrize("version", ["reference", "grouped_mm"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_values_and_gradients_equal_the_loop(counts, dtype, tolerance, version):
    x, weights, fc1, fc2 = make(dtype, h=8, f=16)
    offsets, leaves = offsets_of(counts), [x, weights, *fc1, *fc2]
    end = offsets[-1]
    with hip_ops.use_kernels(grouped_product=version):
        y = ExpertMLP.apply(x, weights, offsets, E, None, 1.0, *fc1, *fc2)
        g = torch.randn_like(y)
        gradients = torch.autograd.grad(y, leaves, g)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = loop(exact[0], exact[1], offsets, exact[2 : 2 + E], exact[2 + E :])
    wanted = torch.autograd.grad(expected, exact, g.double(), allow_unused=True, materialize_grads=True)
    assert not gradients[1][end:].any(), "weights of padding rows"
    pairs = zip(
        [y[:end], gradients[0][:end], *gradients[1:]], [expected[:end], wanted[0][:end], *wanted[1:]], strict=True
    )
    for got, want in pairs:
        assert got.dtype == dtype
        assert (got.double() - want).norm() <= tolerance * want.norm()
        assert not got[want == 0].any()  # exact zeros, and no NaN in them


def test_rows_of_no_expert_ignore_what_lies_in_memory(monkeypatch):
    """NaN in padding rows, which kernels leave uninitialised, does not reach any result."""
    order = hip_ops.sort_by_expert(torch.tensor([2, 0, 3, 0, 3, 3, 3]), E)  # two rows, none, one; 3 is no expert
    honest = hip_ops.grouped_rows

    def poisoned(x, matrices, offsets):
        out = honest(x, matrices, offsets)
        out[int(offsets[-1]) :] = float("nan")
        return out

    monkeypatch.setattr(hip_ops, "grouped_rows", poisoned)
    x, weights, fc1, fc2 = make(torch.float32)
    leaves = [x, weights, *fc1, *fc2]
    rows, row_weights = hip_ops.permute_to_experts(x, order, weights)
    y = hip_ops.unpermute_from_experts(
        ExpertMLP.apply(rows, row_weights, order.offsets, E, None, 1.0, *fc1, *fc2), order
    )
    gradients = torch.autograd.grad(y, leaves, torch.randn_like(y))
    assert all(t.isfinite().all() for t in (y, *gradients))
    skipped = torch.tensor([False, False, True, False, True, True, True])
    assert y[~skipped].all() and not any(t[skipped].any() for t in (y, *gradients[:2]))
    assert not gradients[3].any() and not gradients[3 + E].any()  # expert 1 has no rows


def test_no_rows_at_all():
    x, weights, fc1, fc2 = make(torch.float32, rows=0)
    y = ExpertMLP.apply(x, weights, offsets_of([0, 0, 0]), E, None, 1.0, *fc1, *fc2)
    gradients = torch.autograd.grad(y.sum(), [x, weights, *fc1, *fc2])
    assert y.shape == (0, H) and not any(each.any() for each in gradients)


def test_rows_may_be_made_again():
    x, weights, fc1, fc2 = make(torch.float32)
    leaves, offsets, results, kept = [x, weights, *fc1, *fc2], offsets_of([2, 2, 3]), [], []
    for again in (None, lambda: x.detach() + 0.0):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
            y = ExpertMLP.apply(x, weights, offsets, E, again, 1.0, *fc1, *fc2)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)) and kept.count(x.data_ptr()) == 1


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
    role, other = role_of(experts.linear_fc2.weight2), role_of(experts.linear_fc1.weight2)
    assert (role.block.layer, role.block.size, role.index) == (3, 4, 2)
    assert role.block is role_of(experts.linear_fc2.weight0).block and role.block is not other.block


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
    """Weights whose .data lies in DDP's flat buffer are read without a copy; DDP places parameters in reverse order
    of registration.
    """
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
