# SPDX-License-Identifier: Apache-2.0
"""The model with hip_ops' router and without: the same training; its autograd function against finite differences."""

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

import hip_ops
from tests.hip_ops.router_cases import Router
from tests.model.test_fused_residual_norm import train
from tests.model.test_main_grad import weight_with_main_grad
from zaya_plugin.model.fused_router import RouterMLP
from zaya_plugin.model.router import ZayaRouter

RECOMPUTE = {
    "nothing": {},
    "full": dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
    "permute": dict(recompute_granularity="selective", recompute_modules=["permute"]),
    "moe": dict(recompute_granularity="selective", recompute_modules=["moe"]),
}
OPTIONS = {
    "plain": {},
    "identity": dict(skip_output="identity"),
    "no_skip": dict(moe_skip_expert=False),
    "no_averaging": dict(router_eda=False),
    "fused_experts": dict(fused_expert_path=True),
}


def near(found: dict, wanted: dict) -> None:
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("options", OPTIONS)
def test_fp32_trains_the_same(make_model, batch, options):
    plain_model, fused_model = make_model(**OPTIONS[options]), make_model(fused_router=True, **OPTIONS[options])
    plain, wanted = train(plain_model, batch, 4, 0.05)
    fused, found = train(fused_model, batch, 4, 0.05)
    torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-6)
    near(found, wanted)
    assert plain[-1] < plain[0]
    for ours, theirs in zip(routers(fused_model), routers(plain_model), strict=True):
        assert torch.equal(ours.tokens_per_expert, theirs.tokens_per_expert) and ours.tokens_per_expert.sum() == 4 * 24
        torch.testing.assert_close(ours.router_entropy_sum, theirs.router_entropy_sum, rtol=1e-6, atol=0)


def routers(model) -> list[ZayaRouter]:
    return [layer.mlp.router for layer in model.decoder.layers]


def test_bf16_stays_within_its_noise(make_model, batch):
    options = dict(params_dtype=torch.bfloat16, bf16=True)
    plain, _ = train(make_model(**options), batch, 2, 0.05)
    fused, _ = train(make_model(fused_router=True, **options), batch, 2, 0.05)
    torch.testing.assert_close(fused, plain, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("recompute", [name for name in RECOMPUTE if name != "nothing"])
def test_recomputation_changes_nothing(make_model, batch, recompute):
    plain_model, again_model = make_model(fused_router=True), make_model(fused_router=True, **RECOMPUTE[recompute])
    plain, wanted = train(plain_model, batch, 2, 0.05)
    again, found = train(again_model, batch, 2, 0.05)
    assert torch.equal(plain, again)
    assert all(torch.equal(found[name], gradient) for name, gradient in wanted.items())
    for ours, theirs in zip(routers(again_model), routers(plain_model), strict=True):
        assert torch.equal(ours.tokens_per_expert, theirs.tokens_per_expert), "a token counts once"


def test_a_replayed_routing_is_taken(make_model, batch):
    ids, positions, labels = batch()
    forced = torch.randint(-1, 5, (4, 12, 2))
    losses = []
    for fused in (False, True):
        model = make_model(fused_router=fused)
        loss = model(ids, positions, None, labels=labels, extra_block_kwargs={"context_mask": forced}).mean()
        loss.backward()
        losses.append((loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
        for layer, given in zip(routers(model), forced, strict=True):
            counts = torch.bincount(given[given >= 0], minlength=5)
            assert (layer.tokens_per_expert >= counts).all() and layer.tokens_per_expert.sum() == 24
    torch.testing.assert_close(losses[1][0], losses[0][0], rtol=1e-6, atol=1e-6)
    near(losses[1][1], losses[0][1])


@pytest.mark.parametrize("train", [True, False])
def test_counts_only_in_training_with_gradients(make_config, train):
    router = ZayaRouter(make_config(fused_router=True)).train(train)
    router.set_layer_number(1)
    with torch.no_grad():
        router(torch.randn(6, 3, 32))
    assert router.tokens_per_expert.sum() == 0
    router(torch.randn(6, 3, 32))
    assert router.tokens_per_expert.sum() == 18 * train and (router.router_entropy_sum > 0) == train


def test_the_switch_reaches_the_operators(make_model, batch, monkeypatch):
    calls = []
    for name in ("router_mlp", "router_mlp_backward"):
        original = getattr(hip_ops, name)
        monkeypatch.setattr(
            hip_ops, name, lambda *a, name=name, original=original, **k: calls.append(name) or original(*a, **k)
        )
    train(make_model(fused_router=True), batch, 1, 0.05)
    assert sorted(calls) == ["router_mlp"] * 4 + ["router_mlp_backward"] * 4
    calls.clear()
    train(make_model(), batch, 1, 0.05)
    assert not calls


@pytest.mark.parametrize("used", ["both", "weights", "state"])
@pytest.mark.parametrize(
    "case", [Router(5, 8, 4, torch.float64), Router(4, 8, 3, torch.float64, averaged=False, unweighted=False)], ids=str
)
def test_gradcheck(case, used):
    arguments = case.arguments()
    leaves = [t for t in arguments[:10] if t is not None]
    choice = hip_ops.router_mlp(
        *arguments[:12], eps=arguments[12], unweighted=arguments[13]
    ).ids  # as it is, for small steps not to change it

    def run(*leaves):
        given = iter(leaves)
        tensors = [None if t is None else next(given) for t in arguments[:10]]
        state, weights, _, _ = RouterMLP.apply(*tensors, arguments[10], choice, *arguments[12:])
        return {"both": (state, weights), "weights": (weights,), "state": (state,)}[used]

    assert torch.autograd.gradcheck(run, [leaf.requires_grad_() for leaf in leaves])


def test_gradients_go_into_main_gradients_and_frozen_parameters_get_none():
    case = Router(9)
    arguments = [t.clone() if isinstance(t, torch.Tensor) else t for t in case.arguments()]

    def run(parameters):
        state, weights, *_ = RouterMLP.apply(*arguments[:2], *parameters, *arguments[10:])
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
def test_a_step_under_ddp_gives_the_gradients_of_the_plain_router(make_model, batch, overlap):
    found = []
    for fused in (False, True):
        model = make_model(fused_router=fused)
        options = DistributedDataParallelConfig(
            use_distributed_optimizer=overlap,
            overlap_grad_reduce=overlap,
            bucket_size=20_000 if overlap else None,
            grad_reduce_in_fp32=True,
        )
        ddp = DistributedDataParallel(model.config, options, model)
        ddp.zero_grad_buffer()
        ids, positions, labels = batch()
        with ddp.no_sync():
            ddp(ids, positions, None, labels=labels).mean().backward()
        ddp(ids, positions, None, labels=labels).mean().backward()
        ddp.finish_grad_sync()
        found.append({name: p.main_grad.clone() for name, p in model.named_parameters()})
        of_router = [p for name, p in model.named_parameters() if ".router." in name]
        assert all(p.grad is None for p in of_router)
        assert not fused or all(p.grad_added_to_main_grad for p in of_router)
    near(found[1], found[0])


def test_add_gradients_takes_some_of_each():
    from zaya_plugin.model.main_grad import add_gradients

    direct, plain = weight_with_main_grad(4, 3, torch.bfloat16), torch.nn.Parameter(torch.zeros(5).bfloat16())
    before, sums = direct.main_grad.clone(), [torch.randn(4, 3), torch.randn(5), torch.randn(2)]
    given = add_gradients([direct, plain, None], sums)
    assert (
        torch.equal(direct.main_grad, before + sums[0])
        and given[0].data_ptr() == direct.data_ptr()
        and direct.grad_added_to_main_grad
    )
    assert torch.equal(given[1], sums[1].bfloat16()) and given[2] is None
