# SPDX-License-Identifier: Apache-2.0
"""Steps of Muon made of hip_ops' operators, compared with torch.optim.Muon and emerging_optimizers' Muon with the same
settings.
"""

import pytest
import torch
from torch.optim._muon import DEFAULT_A, DEFAULT_B, DEFAULT_C, EPS, _zeropower_via_newtonschulz

import hip_ops
from hip_ops.ops.muon import MatrixBatches
from tests.hip_ops.muon_oracle import unit

SHAPES = [(32, 48), (48, 32), (16, 16), (32, 48), (17, 40)]
STEPS = 6
# A power of two, and a decay that is exact: then no rounding of scalars stands between fp32 and torch's fp64 scalars.
LR, WEIGHT_DECAY = 2.0**-5, 0.5


def _start(dtype):
    generator = torch.Generator().manual_seed(3)
    params = [(torch.randn(shape, generator=generator) * 0.1).to(dtype) for shape in SHAPES]
    gradients = [[torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES] for _ in range(STEPS)]
    return params, gradients


def _torch_muon(params, gradients, **named):
    """Parameters after every step and the momenta after the last."""
    params = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = torch.optim.Muon(params, lr=LR, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw", **named)
    history = []
    for step in gradients:
        for p, g in zip(params, step, strict=True):
            p.grad = g.clone()
        optimizer.step()
        history.append([p.detach().clone() for p in params])
    return history, [optimizer.state[p]["momentum_buffer"] for p in params]


def _ours(params, gradients, orthogonalise, output=torch.float32, **named):
    params = [p.clone() for p in params]
    momenta = [torch.zeros_like(p) for p in params]
    batches = MatrixBatches(SHAPES, "cpu", output)
    history = []
    for step in gradients:
        hip_ops.muon_momentum_(step, momenta, batches.slots, square_sums=batches.square_sums, **named)
        updates = batches.split(
            [orthogonalise(batch, sums) for batch, sums in zip(batches.tensors, batches.sums(), strict=True)]
        )
        hip_ops.muon_update_(updates, None, params, lr=LR, weight_decay=WEIGHT_DECAY)
        history.append([p.clone() for p in params])
    return history, momenta


def _torch_newton_schulz(batch, _):
    return torch.stack([_zeropower_via_newtonschulz(x, (DEFAULT_A, DEFAULT_B, DEFAULT_C), 5, EPS) for x in batch])


@pytest.mark.parametrize("nesterov, momentum", [(True, 0.95), (False, 0.9)])
def test_fp32_equals_torch_bit_for_bit(chosen, nesterov, momentum):
    """With torch's own Newton-Schulz on our momentum: fused multiply-adds in torch's order give torch's bits."""
    params, gradients = _start(torch.float32)
    theirs, their_momenta = _torch_muon(params, gradients, nesterov=nesterov, momentum=momentum)
    ours, our_momenta = _ours(params, gradients, _torch_newton_schulz, nesterov=nesterov, momentum=momentum)
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert torch.equal(x, y), f"step {step}, matrix {i}: {(x - y).abs().max()}"
    assert all(torch.equal(x, y) for x, y in zip(our_momenta, their_momenta, strict=True))


def test_bf16_differs_from_torch_by_its_second_rounding(chosen):
    """torch rounds a bf16 parameter after the decay and again after the update, ours once; momenta are equal."""
    params, gradients = _start(torch.bfloat16)
    theirs, their_momenta = _torch_muon(params, gradients[:1])
    ours, our_momenta = _ours(params, gradients[:1], _torch_newton_schulz, output=torch.bfloat16)
    assert all(torch.equal(x, y) for x, y in zip(our_momenta, their_momenta, strict=True))
    for before, x, y in zip(params, ours[0], theirs[0], strict=True):
        rounding = 0.5 * unit(before, torch.bfloat16) + unit(torch.maximum(x.abs(), y.abs()), torch.bfloat16)
        # torch's CPU kernels round lr * scale to bf16 as well
        bound = rounding + 2**-8 * (y.double() - before.double()).abs()
        assert ((x.double() - y.double()).abs() <= bound * (1 + 1e-6)).all()
    assert not all(torch.equal(x, y) for x, y in zip(ours[0], theirs[0], strict=True))


@pytest.mark.parametrize("nesterov", [True, False])
def test_fp32_equals_emerging_optimizers(chosen, nesterov):
    muon = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers.muon")
    muon_utils = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers.muon_utils")
    params, gradients = _start(torch.float32)
    theirs = [torch.nn.Parameter(p.clone()) for p in params]
    optimizer = muon.Muon(
        theirs,
        lr=LR,
        momentum=0.95,
        weight_decay=WEIGHT_DECAY,
        nesterov=nesterov,
        scale_mode="spectral",
        extra_scale_factor=0.2,
        fp32_matmul_prec="highest",
    )
    for step in gradients:
        for p, g in zip(theirs, step, strict=True):
            p.grad = g.clone()
        optimizer.step()

    def orthogonalise(batch, _):
        return torch.stack([muon_utils.newton_schulz(x, steps=5, coefficient_type="quintic") for x in batch])

    ours, momenta = _ours(params, gradients, orthogonalise, nesterov=nesterov)
    for x, y in zip(ours[-1], theirs, strict=True):
        assert (x - y).abs().max() < 2e-6 * y.abs().max()
    for p, momentum in zip(theirs, momenta, strict=True):
        assert torch.equal(momentum, optimizer.state[p]["momentum_buffer"])


def test_whole_steps_stay_close_to_torch():
    """With our Newton-Schulz the change of every matrix is torch's but for the noise of torch's bf16 products, and
    nearer to fp64.
    """
    params, gradients = _start(torch.float32)
    theirs, _ = _torch_muon(params, gradients)

    def steps(dtype, inside):
        as_dtype = [p.to(dtype) for p in params], [[g.to(dtype) for g in step] for step in gradients]
        return _ours(*as_dtype, lambda x, sums: hip_ops.newton_schulz(x, square_sums=sums, dtype=inside), output=dtype)[
            0
        ]

    ours, exact = steps(torch.float32, torch.float32), steps(torch.float64, torch.float64)
    for step in (0, STEPS - 1):
        for before, x, y, z in zip(params, ours[step], theirs[step], exact[step], strict=True):
            change = (z - before).norm()
            assert (x - y).norm() < 0.03 * change
            assert (x - z).norm() < 0.1 * (y - z).norm()
