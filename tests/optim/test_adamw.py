# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from zaya_plugin.optim.muon import GroupStepAdamW


def _parameters(seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (3,), (2, 3, 4))]


def test_equals_torch_adamw_over_many_steps():
    ours, theirs = _parameters(0), _parameters(0)
    options = dict(lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    a, b = GroupStepAdamW(ours, **options), torch.optim.AdamW(theirs, **options)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=generator)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
    assert a.param_groups[0]["step"] == 20
    assert set(a.state[ours[0]]) == {"exp_avg", "exp_avg_sq"}


def test_parameters_without_gradient_are_left_alone():
    p, q = _parameters(0)[:2]
    optimizer = GroupStepAdamW([p, q], lr=0.1, weight_decay=0.1)
    before = q.detach().clone()
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(q, before) and not optimizer.state[q]


def test_coupled_decay_is_refused():
    with pytest.raises(ValueError, match="adam_w_mode"):
        GroupStepAdamW(_parameters(0), adam_w_mode=False)
