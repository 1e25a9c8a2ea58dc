# SPDX-License-Identifier: Apache-2.0
"""MuonAdamW on an accelerator with the scale of gradients and the decision to skip in its memory: as on the CPU, and
without a wait.
"""

import torch

from tests.no_waiting import no_waiting
from zaya_plugin.optim.chained import HostCopy
from zaya_plugin.optim.muon import MuonAdamW, MuonSettings, StepContext
from zaya_plugin.optim.parameter_role import ParameterRole

SHAPES = [(48, 32), (24, 40), (48, 32)]
VECTORS = [(4096,), (33,)]
SCALE = 1 / 3


def optimizer_on(device):
    generator = torch.Generator().manual_seed(5)
    params = []
    for shape in SHAPES + VECTORS:
        p = torch.nn.Parameter(torch.randn(shape, generator=generator).to(device))
        if shape in SHAPES:
            p.zaya_role = ParameterRole(matrices=(1, *shape))
        params.append(p)
    return params, MuonAdamW(params, MuonSettings(dtype="fp32"), lr=0.02, weight_decay=0.1, betas=(0.9, 0.95))


def step(params, optimizer, number, skip=False):
    generator = torch.Generator().manual_seed(number)
    device = params[0].device
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(device)
    optimizer.begin_step(StepContext(torch.tensor(SCALE, device=device), torch.tensor(float(skip), device=device)))
    optimizer.step()


def values(params, optimizer):
    return [t.detach().cpu().clone() for p in params for t in (p, *optimizer.state[p].values())]


def test_as_on_the_cpu():
    here, there = optimizer_on("cpu"), optimizer_on("cuda")
    for number in range(3):
        step(*here, number)
        step(*there, number)
    for a, b in zip(values(*here), values(*there), strict=True):
        assert torch.allclose(a, b, rtol=2e-5, atol=1e-5), (a - b).abs().max()


def test_a_skipped_step_changes_nothing_and_is_taken_back():
    params, optimizer = optimizer_on("cuda")
    step(params, optimizer, 0)
    before = values(params, optimizer)
    step(params, optimizer, 1, skip=True)
    optimizer.take_back_step()
    for a, b in zip(before, values(params, optimizer), strict=True):
        assert torch.equal(a, b)
    assert optimizer.param_groups[0]["step"] == 1
    step(params, optimizer, 2)
    clean, other = optimizer_on("cuda")
    step(clean, other, 0)
    step(clean, other, 2)
    for a, b in zip(values(params, optimizer), values(clean, other), strict=True):
        assert torch.equal(a, b)


def test_nothing_waits():
    params, optimizer = optimizer_on("cuda")
    for number in range(2):
        step(params, optimizer, number)
    optimizer.begin_step(StepContext(torch.tensor(SCALE, device="cuda"), torch.tensor(0.0, device="cuda")))
    with no_waiting():
        optimizer.step()
        copy = HostCopy([params[0].detach()])
    assert torch.equal(copy.read()[0], params[0].detach().cpu())


def test_a_copy_is_complete_when_the_device_gets_there():
    busy = torch.randn(4096, 4096, device="cuda")
    source = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    for _ in range(50):
        busy = busy @ busy * 1e-3
    copy = HostCopy([source])
    source.zero_()
    assert not copy.is_complete
    assert copy.read()[0].item() == 1 and copy.is_complete
