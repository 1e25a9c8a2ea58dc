# SPDX-License-Identifier: Apache-2.0
"""Test Muon's multi-tensor operators on an accelerator: Triton, and hip_ops/ops/muon/muon.hip compiled for it (by nvcc
on NVIDIA).
"""

import itertools
import math

import pytest
import torch

import hip_ops
from hip_ops import use_kernels
from hip_ops.ops.muon import MatrixBatches, multi_tensor, rms_matching_scale
from hip_ops.runtime import choice
from tests.hip_ops.muon_oracle import GUARD, Lists, check_momentum, check_update, guards_intact, make_lists
from tests.no_waiting import no_waiting

BF16, FP32 = torch.bfloat16, torch.float32
DEVICE = torch.device("cuda")
# Whole chunks, ragged ends, small ones, none, heads, and tensors at which nothing can be aligned.
SHAPES = [(256, 2048), (128, 300), (17, 256), (1, 1), (0, 8), (96, 512), (77, 999), (64, 1024)]
OFFSETS = [0, 0, 0, 1, 0, 3, (0, 1, 2, 3, 4), 4]


def on_device(lists: Lists) -> Lists:
    """Copies at the same offsets from aligned addresses, guards included."""

    def move(view):
        flat = torch.empty(0, dtype=view.dtype).set_(view.untyped_storage()).to(DEVICE)
        return flat[view.storage_offset() : view.storage_offset() + view.numel()].view(view.shape)

    return Lists(
        *(
            [move(t) for t in column]
            for column in (lists.gradients, lists.momenta, lists.outputs, lists.masters, lists.params)
        )
    )


def lists_of(seed, *dtypes, shapes=SHAPES, offsets=OFFSETS) -> tuple[Lists, Lists]:
    """Return the lists on the CPU and on the device."""
    lists = make_lists(shapes, seed, *dtypes, offsets=offsets)
    assert lists.params[0].storage_offset() == GUARD + (offsets[0] if offsets else 0)
    return lists, on_device(lists)


def everything(lists: Lists) -> list[torch.Tensor]:
    return [*lists.momenta, *lists.outputs, *lists.masters, *lists.params]


def cpu(tensors):
    return [t.cpu() for t in tensors]


@pytest.mark.parametrize("dtypes", list(itertools.product((BF16, FP32), repeat=3)), ids=str)
def test_momentum_against_fp64(chosen, dtypes):
    before, lists = lists_of(1, *dtypes)
    sums, scale = torch.full((len(SHAPES),), math.nan, device=DEVICE), torch.tensor([0.37], device=DEVICE)
    hip_ops.muon_momentum_(lists.gradients, lists.momenta, lists.outputs, grad_scale=scale, square_sums=sums)
    for i, (g, b, a, o) in enumerate(
        zip(before.gradients, before.momenta, cpu(lists.momenta), cpu(lists.outputs), strict=True)
    ):
        check_momentum(g, b, a, o, grad_scale=0.37, what=f"tensor {i}")
        exact = o.double().square().sum().item()
        assert abs(sums[i].item() - exact) <= 2e-6 * exact, f"tensor {i}: {sums[i].item()}, exact {exact}"
    assert all(guards_intact(t) for t in everything(lists))


@pytest.mark.parametrize(
    "update, master, param",
    [
        (BF16, FP32, BF16),
        (FP32, FP32, BF16),
        (BF16, FP32, FP32),
        (FP32, FP32, FP32),
        (BF16, None, BF16),
        (FP32, None, BF16),
        (BF16, None, FP32),
        (FP32, None, FP32),
    ],
)
@pytest.mark.parametrize("lr_on_device", [False, True])
def test_update_against_fp64(chosen, update, master, param, lr_on_device):
    before, lists = lists_of(2, BF16, FP32, update, FP32, param)
    lr = torch.tensor(0.02, device=DEVICE) if lr_on_device else 0.02
    hip_ops.muon_update_(lists.outputs, lists.masters if master else None, lists.params, lr=lr, weight_decay=0.1)
    old, new = (before.masters, cpu(lists.masters)) if master else (before.params, cpu(lists.params))
    for i, shape in enumerate(SHAPES):
        check_update(
            before.outputs[i],
            old[i],
            new[i],
            lr=0.02,
            weight_decay=0.1,
            scale=rms_matching_scale(shape),
            what=f"tensor {i}",
        )
        assert torch.equal(lists.params[i].cpu(), new[i].to(param)) or not master
    assert all(guards_intact(t) for t in everything(lists))


@pytest.mark.skipif(
    torch.cuda.is_available() and bool(choice.missing("hip", DEVICE, named=True)),
    reason="the HIP sources cannot be built here",
)
def test_triton_and_hip_give_the_same_bits():
    results = []
    for name in ("triton", "hip"):
        _, lists = lists_of(3)
        with use_kernels(name):
            hip_ops.muon_momentum_(lists.gradients, lists.momenta, lists.outputs)
            hip_ops.muon_update_(lists.outputs, lists.masters, lists.params, lr=0.02, weight_decay=0.1)
        results.append(everything(lists))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_with_and_without_nesterov(chosen):
    for nesterov, momentum in itertools.product((True, False), (0.95, 0.0)):
        before, lists = lists_of(4, shapes=[(40, 999)], offsets=None)
        hip_ops.muon_momentum_(lists.gradients, lists.momenta, lists.outputs, nesterov=nesterov, momentum=momentum)
        check_momentum(
            before.gradients[0],
            before.momenta[0],
            lists.momenta[0].cpu(),
            lists.outputs[0].cpu(),
            momentum=momentum,
            nesterov=nesterov,
        )


def test_square_sums_are_deterministic(chosen):
    sums = []
    for _ in range(5):
        _, lists = lists_of(5)
        sums.append(torch.empty(len(SHAPES), device=DEVICE))
        hip_ops.muon_momentum_(lists.gradients, lists.momenta, lists.outputs, square_sums=sums[-1])
    assert all(torch.equal(s, sums[0]) for s in sums)


@pytest.mark.parametrize("flag", [1.0, math.inf, math.nan])
def test_an_infinite_gradient_changes_nothing(chosen, flag):
    before, lists = lists_of(6)
    sums, found = torch.full((len(SHAPES),), 3.0, device=DEVICE), torch.tensor([flag], device=DEVICE)
    hip_ops.muon_momentum_(lists.gradients, lists.momenta, lists.outputs, found_inf=found, square_sums=sums)
    hip_ops.muon_update_(lists.outputs, lists.masters, lists.params, lr=0.1, found_inf=found)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(everything(lists), everything(before), strict=True))
    assert (sums == 3).all()


def test_nothing_waits_for_the_device(chosen):
    _, lists = lists_of(7)
    found, scale, lr = (torch.tensor(x, device=DEVICE) for x in (0.0, 0.5, 0.02))
    sums = torch.zeros(len(SHAPES), device=DEVICE)

    def step():
        hip_ops.muon_momentum_(
            lists.gradients, lists.momenta, lists.outputs, found_inf=found, grad_scale=scale, square_sums=sums
        )
        hip_ops.muon_update_(lists.outputs, lists.masters, lists.params, lr=lr, found_inf=found)

    step()  # compiles, and runs the self-check
    lists.gradients = [g.clone() for g in lists.gradients]  # new tables
    with no_waiting():
        step()


def test_on_another_stream(chosen):
    before, lists = lists_of(8)
    stream = torch.cuda.Stream()
    for _ in range(2):  # one table was uploaded on the default stream, the other is on this one
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            momenta = [b.to(DEVICE) for b in before.momenta]
            hip_ops.muon_momentum_(lists.gradients, momenta, lists.outputs)
        torch.cuda.current_stream().wait_stream(stream)
        for i, (g, b, a, o) in enumerate(
            zip(before.gradients, before.momenta, cpu(momenta), cpu(lists.outputs), strict=True)
        ):
            check_momentum(g, b, a, o, what=f"tensor {i}")


def test_cuda_graph(chosen):
    """The captured graph has its own tables; replays read the scalars on the device and do not depend on the cache."""
    before, lists = lists_of(9)
    lr, scale, found = (
        torch.tensor(0.02, device=DEVICE),
        torch.tensor([1.0], device=DEVICE),
        torch.zeros(1, device=DEVICE),
    )

    def step():
        hip_ops.muon_momentum_(lists.gradients, lists.momenta, lists.outputs, grad_scale=scale, found_inf=found)
        hip_ops.muon_update_(lists.outputs, lists.masters, lists.params, lr=lr, weight_decay=0.1, found_inf=found)

    with_own_tensors = lists
    lists = on_device(before)
    step()  # compiles every variant outside of the capture, with other tables
    lists = with_own_tensors
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    multi_tensor._uploaded.cache_clear()
    junk = [torch.full((1 << 16,), -1, dtype=torch.int64, device=DEVICE) for _ in range(8)]
    for rate, factor, flag in ((0.02, 1.0, 0.0), (0.5, 0.25, 0.0), (0.1, 1.0, 1.0)):
        old = cpu(lists.momenta), cpu(lists.masters), cpu(lists.params)
        lr.fill_(rate), scale.fill_(factor), found.fill_(flag)
        graph.replay()
        new, outputs, masters = cpu(lists.momenta), cpu(lists.outputs), cpu(lists.masters)
        for i, shape in enumerate(SHAPES):
            if flag:
                assert (
                    torch.equal(new[i], old[0][i])
                    and torch.equal(masters[i], old[1][i])
                    and torch.equal(lists.params[i].cpu(), old[2][i])
                )
            else:
                check_momentum(
                    before.gradients[i], old[0][i], new[i], outputs[i], grad_scale=factor, what=f"tensor {i}"
                )
                check_update(
                    outputs[i],
                    old[1][i],
                    masters[i],
                    lr=rate,
                    weight_decay=0.1,
                    scale=rms_matching_scale(shape),
                    what=f"tensor {i}",
                )
    del junk


def test_steps_compared_with_torch_optim_muon(chosen):
    """Five steps with torch's own Newton-Schulz on our momentum: the same fp32 parameters."""
    from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _zeropower_via_newtonschulz

    shapes = [(128, 256), (256, 128), (64, 64), (128, 256)]
    generator = torch.Generator().manual_seed(0)
    start = [torch.randn(s, generator=generator).to(DEVICE) * 0.1 for s in shapes]
    theirs, ours = [torch.nn.Parameter(p.clone()) for p in start], [p.clone() for p in start]
    optimizer = torch.optim.Muon(theirs, lr=2.0**-5, weight_decay=0.5, adjust_lr_fn="match_rms_adamw")
    batches, momenta = MatrixBatches(shapes, DEVICE, FP32), [torch.zeros_like(p) for p in start]
    for _ in range(5):
        gradients = [torch.randn(s, generator=generator).to(DEVICE) for s in shapes]
        for p, g in zip(theirs, gradients, strict=True):
            p.grad = g.clone()
        optimizer.step()
        hip_ops.muon_momentum_(gradients, momenta, batches.slots)
        updates = [
            torch.stack([_zeropower_via_newtonschulz(x, (DEFAULT_A, DEFAULT_B, DEFAULT_C), 5, EPS) for x in b])
            for b in batches.tensors
        ]
        hip_ops.muon_update_(batches.split(updates), None, ours, lr=2.0**-5, weight_decay=0.5)
    for p, momentum, x, y in zip(theirs, momenta, ours, theirs, strict=True):
        assert (momentum - optimizer.state[p]["momentum_buffer"]).abs().max() <= 2e-7
        # a rounding of the momentum may flip roundings of bf16 in Newton-Schulz
        assert (x - y).norm() <= 2e-3 * y.norm()


def test_compiled_step(chosen):
    _, eager = lists_of(11, shapes=[(64, 64), (33, 7)], offsets=None)
    _, compiled = lists_of(11, shapes=[(64, 64), (33, 7)], offsets=None)

    def step(lists):
        hip_ops.muon_momentum_(lists.gradients, lists.momenta, lists.outputs)
        hip_ops.muon_update_(lists.outputs, lists.masters, lists.params, lr=0.02, weight_decay=0.1)

    step(eager)
    torch.compile(step)(compiled)
    assert all(torch.equal(a, b) for a, b in zip(everything(eager), everything(compiled), strict=True))
