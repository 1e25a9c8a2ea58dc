# SPDX-License-Identifier: Apache-2.0
"""No parameter is read before its module's hooks have run; tests/distributed/test_param_gather.py has real gathers."""

import pytest
import torch
from torch import nn

import hip_ops
from zaya_plugin.model.parameters import gathered


def test_hooks_run_as_at_a_call():
    module, seen = nn.Linear(2, 2), []
    module.register_forward_pre_hook(lambda module, positional: seen.append((module, positional)))
    module.register_forward_pre_hook(lambda module, positional, named: seen.append(named), with_kwargs=True)
    assert gathered(module) is module
    assert seen == [(module, ())]  # and not the one that expects a call's keywords


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        pytest.param(  # Megatron compiles a C++ extension
            dict(recompute_granularity="selective", recompute_modules=["layernorm"]), marks=pytest.mark.slow
        ),
    ],
    ids=["nothing_recomputed", "full_recomputation", "norms_recomputed"],
)
@pytest.mark.parametrize("kernels", ["reference", "hip"])
def test_parameters_that_arrive_when_their_modules_hooks_run_are_all_there(make_model, batch, overrides, kernels):
    """The model computes with parameters that arrive only when their module's pre-forward hook runs; until then they
    are NaN.
    """
    with hip_ops.use_kernels(kernels):
        check_arrival(make_model(**overrides), batch)


def check_arrival(model, batch):
    ids, positions, labels = batch()
    with torch.no_grad():
        expected = model(ids, positions, None, labels=labels)
    values = {parameter: parameter.detach().clone() for parameter in model.parameters()}

    @torch.no_grad()
    def arrive(module, *_):
        for parameter in module.parameters(recurse=False):
            if parameter in values:
                parameter.copy_(values.pop(parameter))

    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    for module in model.modules():
        module.register_forward_pre_hook(arrive)
    losses = model(ids, positions, None, labels=labels)
    assert torch.equal(losses, expected)
    assert not values
    losses.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
