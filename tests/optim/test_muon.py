# SPDX-License-Identifier: Apache-2.0
"""MuonAdamW against independent optimizers: torch.optim.Muon, emerging_optimizers and torch.optim.AdamW."""

import copy
import math
import multiprocessing

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

import hip_ops
from zaya_plugin.optim.muon import MuonAdamW, MuonSettings, StepContext
from zaya_plugin.optim.parameter_role import ParameterRole, role_of
from zaya_plugin.optim.sharding.distributed import CutMatrix, MatrixExchange

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


def _dion3(weight, gradients, fraction, momentum=0.95, steps=5):
    """The weight after Algorithm 4 of arXiv 2608.11612 (its Muon flavour), in fp64: a step for each of `gradients`."""
    wide = weight.double() if weight.shape[0] <= weight.shape[1] else weight.double().T
    kept, k = torch.zeros_like(wide), math.ceil(fraction * len(wide))
    for gradient in gradients:
        kept = kept + (gradient.double() if gradient.shape == wide.shape else gradient.double().T)
        rows = sorted(range(len(wide)), key=lambda row: -float(kept[row].abs().sum()))[:k]
        x = kept[rows] / kept[rows].norm()
        for _ in range(steps):
            a = x @ x.T
            x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
        wide = wide * (1 - LR * DECAY)
        # the learning rate is divided by the root of the selected share (section 8.1), rounded up here as the rows are
        wide[rows] -= LR / math.sqrt(k / len(wide)) * 0.2 * math.sqrt(max(wide.shape)) * x
        kept[rows] *= momentum
    return wide if wide.shape == weight.shape else wide.T


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


@pytest.mark.parametrize("fraction", [0.25, 0.5])
def test_dion3_is_the_papers_algorithm(fraction):
    """Rows, columns where they are fewer, error feedback and the size of the update, against a loop in fp64."""
    ours, gradients = _parameters(), []
    optimizer = _ours(ours, dtype="fp32", nesterov=False, row_fraction=fraction)
    for number in range(12):
        _give_gradients(ours, number)
        gradients.append([p.grad.clone() for p in ours])
        optimizer.step()
    for p, start, taken in zip(ours[: len(SHAPES)], _parameters(), zip(*gradients, strict=True), strict=False):
        exact = _dion3(start.detach(), taken, fraction)
        assert _distance(p.detach().double() - start, exact - start) < 1e-4


def test_dion3_with_all_rows_is_muon_to_the_bit():
    """A fraction that rounds up to all rows of these matrices still undoes the decay where nothing changed: nowhere."""
    muon, dion3 = _parameters(), _parameters()
    _run([_ours(muon)], muon, 3)
    _run([_ours(dion3, row_fraction=0.99)], dion3, 3)
    assert all(map(torch.equal, muon, dion3))


def test_dion3_changes_no_momentum_in_a_skipped_step():
    """On a GPU the kernels skip a step on the device, after the host has launched all of them."""
    optimizer, changed = _ours(_parameters(), row_fraction=0.25), torch.tensor([True, False])
    factors = [optimizer.undo_decay(StepContext(skip=torch.tensor(skip)), changed).tolist() for skip in (1.0, 0.0)]
    assert factors == [[1.0, 1.0], pytest.approx([1.0, 1 / 0.95])]


@pytest.mark.parametrize("before", [0.25, 1.0], ids=["dion3", "muon"])
def test_dion3_continues_from_a_checkpoint(before):
    """Its own to the bit, and Muon's, which has the same state; a row that waits has the momentum of its gradients."""
    params, again = _parameters(), _parameters()
    saved = _ours(params, row_fraction=before)
    _run([saved], params, 3)
    for p, q in zip(params, again, strict=True):
        q.data.copy_(p.data)
    resumed = _ours(again, row_fraction=0.25)
    resumed.load_state_dict(copy.deepcopy(saved.state_dict()))
    saved.muon = resumed.muon
    for number in (3, 4):
        for side in (params, again):
            _give_gradients(side, number)
        saved.step()
        resumed.step()
    assert all(map(torch.equal, params, again))
    assert all(set(resumed.state[p]) == {"exp_avg"} for p in again[: len(SHAPES)])


@pytest.mark.parametrize(
    "settings", [{"row_fraction": 0.0}, {"row_fraction": 1.5}, {"row_fraction": 0.5, "momentum": 0.0}]
)
def test_a_share_of_rows_that_cannot_be_selected_is_refused(settings):
    with pytest.raises(ValueError, match=r"^row_fraction=.*Allowed: above 0, at most 1.*Fix: row_fraction=0.25"):
        MuonSettings(**settings)


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


def _piece(rank, directory, fraction):
    """One of two ranks that share three matrices: its weights and momenta after four steps."""
    torch.set_num_threads(1)
    torch.distributed.distributed_c10d._update_default_pg(None)  # an earlier test's, which the fork has copied
    store = torch.distributed.FileStore(str(directory / "store"), 2)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
    whole = _parameters(flat=True)[:3]
    ends = [[0, cut, p.numel()] for p, cut in zip(whole, (500, 700, 33), strict=True)]
    parts = [torch.nn.Parameter(p.detach()[e[rank] : e[rank + 1]].clone()) for p, e in zip(whole, ends, strict=True)]
    for p, part in zip(whole, parts, strict=True):
        part.zaya_role = p.zaya_role
    pieces = [((0, e[0], e[1]), (1, e[1], e[2])) for e in ends]
    cut = {part: CutMatrix(index, piece) for index, (part, piece) in enumerate(zip(parts, pieces, strict=True))}
    optimizer = _ours(parts, row_fraction=fraction)
    for number in range(4):
        _give_gradients(whole + _parameters()[3:], number)
        for p, part, e in zip(whole, parts, ends, strict=True):
            part.grad = p.grad[e[rank] : e[rank + 1]].clone()
        optimizer.begin_step(StepContext(exchange=MatrixExchange(torch.distributed.group.WORLD, cut)))
        optimizer.step()
    torch.save([(p.detach(), optimizer.state[p]["exp_avg"]) for p in parts], directory / f"{rank}.pt")


def test_dion3_of_two_ranks_that_share_matrices_is_that_of_one(tmp_path):
    """Rows are selected at the owner of a matrix; each rank undoes the decay of its own piece."""
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=_piece, args=(rank, tmp_path, 0.25)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    one = _parameters(flat=True)
    optimizer = _ours(one, row_fraction=0.25)
    _run([optimizer], one, 4)
    halves = zip(*(torch.load(tmp_path / f"{rank}.pt") for rank in range(2)), strict=True)
    for p, ((low, low_momentum), (high, high_momentum)) in zip(one, halves, strict=False):
        assert torch.equal(torch.cat((low, high)), p.detach())
        assert torch.equal(torch.cat((low_momentum, high_momentum)), optimizer.state[p]["exp_avg"])
