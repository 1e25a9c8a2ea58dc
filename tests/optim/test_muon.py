# SPDX-License-Identifier: Apache-2.0
"""MuonAdamW against independent optimizers: torch.optim.Muon, emerging_optimizers and torch.optim.AdamW."""

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

import hip_ops
from zaya_plugin.optim.muon import MuonAdamW, MuonSettings, StepContext
from zaya_plugin.optim.parameter_role import ParameterRole, role_of

# Wide, tall, square, the router's head, and two of one shape, which go through Newton-Schulz as one batch.
SHAPES = [(48, 32), (24, 40), (32, 32), (17, 16), (48, 32)]
VECTORS = [(40,), (5, 3, 2)]
LR, DECAY = 0.02, 0.1


def _parameters(dtype=torch.float32, flat=False):
    generator = torch.Generator().manual_seed(3)
    params = []
    for shape in SHAPES + VECTORS:
        value = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        p = torch.nn.Parameter((value.flatten() if flat else value).to(dtype))
        if shape in SHAPES:
            p.zaya_role = ParameterRole(matrices=(1, *shape))
        params.append(p)
    return params


def _give_gradients(params, step):
    """Set the same gradients for every optimizer: low rank plus noise, as real gradients have."""
    generator = torch.Generator().manual_seed(100 + step)
    for p, shape in zip(params, SHAPES + VECTORS, strict=True):
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 2:
            noise = 0.1 * noise + torch.randn(shape[0], 2, generator=generator) @ torch.randn(
                2, shape[1], generator=generator
            )
        p.grad = noise.reshape(p.shape).to(p.dtype)


def _ours(params, **settings):
    return MuonAdamW(params, MuonSettings(**settings), lr=LR, weight_decay=DECAY, betas=(0.9, 0.95))


def _run(optimizers, params, steps):
    for step in range(steps):
        _give_gradients(params, step)
        for optimizer in optimizers:
            optimizer.step()
    return params


def _torchs(matrix):
    """torch.optim.Muon's five iterations of one matrix, in bf16."""
    return _zeropower_via_newtonschulz(matrix, (3.4445, -4.775, 2.0315), 5, 1e-7)


def _distance(a, b):
    return float((a.flatten() - b.flatten()).norm() / b.norm())


@pytest.mark.parametrize("steps", [1, 50])
def test_all_but_newton_schulz_is_torchs_muon(steps, monkeypatch):
    """With torch's iterations in place of hip_ops', which round differently in bf16, the update is that of
    torch.optim.Muon.
    """
    monkeypatch.setattr(
        MuonAdamW, "orthogonalise", lambda self, batch, sums=None: torch.stack(list(map(_torchs, batch)))
    )
    ours, theirs = _parameters(), _parameters()
    _run([_ours(ours)], ours, steps)
    muon = torch.optim.Muon(
        theirs[: len(SHAPES)], lr=LR, weight_decay=DECAY, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(theirs[len(SHAPES) :], lr=LR, weight_decay=DECAY, betas=(0.9, 0.95))
    _run([muon, adamw], theirs, steps)
    for a, b in zip(ours, theirs, strict=True):
        assert _distance(a, b) < 1e-6


@pytest.mark.parametrize("steps", [1, 50])
@pytest.mark.parametrize("name", ["simple", "quintic", "polar_express"])
def test_fp32_iterations_are_emerging_optimizers(steps, name):
    emerging = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers")
    ours, theirs = _parameters(), _parameters()
    _run([_ours(ours, dtype="fp32", coefficients=name)], ours, steps)
    muon = emerging.Muon(
        theirs[: len(SHAPES)],
        lr=LR,
        weight_decay=DECAY,
        momentum=0.95,
        nesterov=True,
        weight_decay_method="decoupled",
        fp32_matmul_prec="highest",
        coefficient_type=name,
        num_ns_steps=5,
        scale_mode="spectral",
        extra_scale_factor=0.2,
    )
    adamw = torch.optim.AdamW(theirs[len(SHAPES) :], lr=LR, weight_decay=DECAY, betas=(0.9, 0.95))
    _run([muon, adamw], theirs, steps)
    for a, b in zip(ours, theirs, strict=True):
        assert _distance(a, b) < 1e-5


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_iterations_are_no_further_from_fp64_than_torchs(dtype):
    """One update of each matrix is no further from the polynomial in fp64, on the same momentum, than torch's."""
    shapes = [(96, 64), (64, 64), (64, 160)]
    generator = torch.Generator().manual_seed(8)
    for shape in shapes:
        batch = torch.randn(6, *shape, generator=generator).bfloat16()
        exact = hip_ops.newton_schulz(batch.double(), dtype=torch.float64)
        optimizer = MuonAdamW([torch.nn.Parameter(torch.zeros(1))], MuonSettings(dtype=dtype))
        found = optimizer.orthogonalise(batch).double()
        plain = torch.stack(list(map(_torchs, batch))).double()
        assert (found - exact).norm() <= (plain - exact).norm()
        assert (plain - exact).norm() / exact.norm() > 1e-4  # there is something to lose


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_each_dtype_of_the_iterations_trains(dtype):
    ours, exact = _parameters(), _parameters()
    _run([_ours(ours, dtype=dtype)], ours, 3)
    _run([_ours(exact, dtype="fp32")], exact, 3)
    for a, b, before in zip(ours, exact, _parameters(), strict=True):
        assert (a - b).norm() < 0.05 * (b - before).norm()


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_size_of_the_gradients_changes_nothing(dtype):
    """With a norm clipped to 1, gradients of 400 M parameters are 5e-5 each, and their momentum is less; fp16's least
    number is 6e-8.
    """
    optimizer = MuonAdamW([torch.nn.Parameter(torch.zeros(1))], MuonSettings(dtype=dtype))
    batch = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(9)).bfloat16()
    assert torch.equal(optimizer.orthogonalise(batch * 2.0**-20), optimizer.orthogonalise(batch))


def test_flat_parameters_give_the_same():
    square, flat = _parameters(), _parameters(flat=True)
    _run([_ours(square)], square, 5)
    _run([_ours(flat)], flat, 5)
    for a, b in zip(square, flat, strict=True):
        assert torch.equal(a.flatten(), b)


def test_rounds_bound_the_memory_and_change_nothing():
    one, many = _parameters(), _parameters()
    _run([_ours(one)], one, 3)
    _run([_ours(many, elements_at_once=1500)], many, 3)
    for a, b in zip(one, many, strict=True):
        assert _distance(a, b) < 1e-6


def test_halves_are_orthogonalised_separately():
    whole, halves = _parameters(), _parameters()
    whole[0].zaya_role = ParameterRole(matrices=(2, 24, 32))
    top, bottom = (torch.nn.Parameter(h.detach().clone()) for h in halves[0].chunk(2))
    top.zaya_role = bottom.zaya_role = ParameterRole(matrices=(1, 24, 32))
    ours, theirs = _ours(whole[:1]), _ours([top, bottom])
    for step in range(3):
        _give_gradients(whole, step)
        top.grad, bottom.grad = whole[0].grad.chunk(2)
        ours.step()
        theirs.step()
    assert _distance(whole[0], torch.cat((top, bottom))) < 1e-6


def test_the_target_gets_the_rounded_weight_in_the_same_step():
    params = _parameters(flat=True)
    optimizer = _ours(params)
    targets = {p: torch.zeros(p.shape, dtype=torch.bfloat16) for p in params[: len(SHAPES)]}
    for number in range(2):
        _give_gradients(params, number)
        optimizer.begin_step(StepContext(targets=targets))
        optimizer.step()
    for p, target in targets.items():
        assert torch.equal(target, p.detach().to(torch.bfloat16))


def test_bf16_momentum_stays_bf16_through_a_checkpoint():
    params, again = _parameters(), _parameters()
    optimizer = _ours(params, momentum_dtype="bf16")
    _run([optimizer], params, 2)
    reference = _parameters()
    _run([_ours(reference)], reference, 2)
    assert _distance(params[0], reference[0]) < 5e-3
    other = _ours(again, momentum_dtype="bf16")
    other.load_state_dict(optimizer.state_dict())
    for p, q in zip(params, again, strict=True):
        assert set(other.state[q]) == set(optimizer.state[p])
        for key, value in optimizer.state[p].items():
            assert other.state[q][key].dtype == value.dtype and torch.equal(other.state[q][key], value)
    assert optimizer.state[params[0]]["exp_avg"].dtype == torch.bfloat16


def test_the_state_is_what_each_needs():
    params = _parameters()
    optimizer = _ours(params)
    _run([optimizer], params, 1)
    for p in params:
        assert set(optimizer.state[p]) == ({"exp_avg"} if role_of(p).matrices else {"exp_avg", "exp_avg_sq"})
    assert optimizer.param_groups[0]["step"] == 1


def test_updates_have_the_root_mean_square_of_adamw():
    """After one step from zero Muon's update has AdamW's root mean square, which is the purpose of the scale."""
    params = _parameters()
    before = [p.detach().clone() for p in params]
    optimizer = MuonAdamW(params, MuonSettings(), lr=LR, weight_decay=0.0)
    _run([optimizer], params, 1)
    moved = [float((p - b).square().mean().sqrt()) / LR for p, b in zip(params, before, strict=True)]
    for p, rms in zip(params, moved, strict=True):
        # 0.2 sqrt(max(m, n)) times an orthogonal matrix has rms 0.2 sqrt(rank / min(m, n)) <= 0.2; the quintic's
        # singular values lie in 0.7 to 1.2.
        low, high = (0.1, 0.25) if role_of(p).matrices else (0.99, 1.01)
        assert low < rms < high
