# SPDX-License-Identifier: Apache-2.0
"""The router's autograd function: against finite differences, and its gradients under DDP."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from tests.hip_ops.router_cases import Router, public_call
from tests.model.test_main_grad import weight_with_main_grad
from zaya_plugin.model.router import RouterMLP


def near(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("used", ["both", "weights", "state"])
@pytest.mark.parametrize(
    "case", [Router(5, 8, 4, torch.float64), Router(4, 8, 3, torch.float64, averaged=False, unweighted=False)], ids=str
)
def test_gradcheck(case, used):
    arguments = case.arguments()
    leaves = [t for t in arguments[:10] if t is not None]
    # as it is, for small steps not to change it
    choice = public_call(arguments).ids

    def run(*leaves):
        given = iter(leaves)
        tensors = [None if t is None else next(given) for t in arguments[:10]]
        state, weights, _, _ = RouterMLP.apply(*tensors[:2], choice, *arguments[12:], *tensors[2:], arguments[10])
        return {"both": (state, weights), "weights": (weights,), "state": (state,)}[used]

    assert torch.autograd.gradcheck(run, [leaf.requires_grad_() for leaf in leaves])


def test_gradients_go_into_main_gradients_and_frozen_parameters_get_none():
    case = Router(9)
    arguments = [t.clone() if isinstance(t, torch.Tensor) else t for t in case.arguments()]

    def run(parameters):
        state, weights, *_ = RouterMLP.apply(*arguments[:2], *arguments[11:], *parameters, arguments[10])
        (weights * case.upstream()[0]).sum().add((state * case.upstream()[1]).sum()).backward()

    plain = [torch.nn.Parameter(t) for t in arguments[2:10]]
    run(plain)
    ours = []
    for parameter in plain:
        ours.append(torch.nn.Parameter(parameter.detach().clone()))
        ours[-1].main_grad, ours[-1].grad_added_to_main_grad = torch.ones_like(parameter), False
    ours[3].requires_grad_(False), ours[1].requires_grad_(False)
    run(ours)
    for place, (parameter, reference) in enumerate(zip(ours, plain, strict=True)):
        frozen = place in (1, 3)
        wanted = torch.ones_like(parameter) if frozen else 1 + reference.grad
        torch.testing.assert_close(parameter.main_grad, wanted, rtol=1e-5, atol=1e-5)
        assert parameter.grad_added_to_main_grad != frozen
        assert parameter.grad is None if frozen else parameter.grad.data_ptr() == parameter.data_ptr()


@pytest.mark.parametrize("overlap", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_step_under_ddp_gives_the_gradients_of_autograd(make_model, batch, overlap):
    ids, positions, labels = batch()
    plain, model = make_model(), make_model()
    for _ in range(2):
        plain(ids, positions, None, labels=labels).mean().backward()
    options = DistributedDataParallelConfig(
        use_distributed_optimizer=overlap,
        overlap_grad_reduce=overlap,
        bucket_size=20_000 if overlap else None,
        grad_reduce_in_fp32=True,
    )
    ddp = DistributedDataParallel(model.config, options, model)
    ddp.zero_grad_buffer()
    with ddp.no_sync():
        ddp(ids, positions, None, labels=labels).mean().backward()
    ddp(ids, positions, None, labels=labels).mean().backward()
    ddp.finish_grad_sync()
    of_router = {name: p for name, p in model.named_parameters() if ".router." in name}
    assert all(p.grad is None and p.grad_added_to_main_grad for p in of_router.values())
    near(
        {name: p.main_grad for name, p in of_router.items()},
        {name: plain.get_parameter(name).grad for name in of_router},
    )


def test_add_gradients_takes_some_of_each():
    from hip_ops.runtime.main_grad import add_gradients

    direct, plain = weight_with_main_grad(4, 3, torch.bfloat16), torch.nn.Parameter(torch.zeros(5).bfloat16())
    before, sums = direct.main_grad.clone(), [torch.randn(4, 3), torch.randn(5), torch.randn(2)]
    given = add_gradients([direct, plain, None], sums)
    assert (
        torch.equal(direct.main_grad, before + sums[0])
        and given[0].data_ptr() == direct.data_ptr()
        and direct.grad_added_to_main_grad
    )
    assert torch.equal(given[1], sums[1].bfloat16()) and given[2] is None
