# SPDX-License-Identifier: Apache-2.0
"""Routing rule, counters and the buffers that must not be cast."""

import warnings

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

from zaya_plugin.model.router import StepsWithoutBalancing, ZayaRouter


@pytest.fixture
def make_router(make_config):
    def make(layer_number=2, **overrides):
        router = ZayaRouter(make_config(**overrides))
        router.set_layer_number(layer_number)
        with torch.no_grad():
            for p in router.parameters():
                p.add_(0.3 * torch.randn_like(p))
        return router

    return make


def inputs(s=6, b=3):
    return torch.randn(s, b, 32), torch.randn(s, b, 16)


def projected(router, x):
    return torch.nn.functional.linear(x, router.down_proj.weight) + router.down_proj.bias


def test_state_is_averaged_before_the_norm_and_layer_1_has_no_gamma(make_router):
    x, previous = inputs()
    router = make_router(2)
    state = router(x, previous)[2]
    torch.testing.assert_close(state, projected(router, x) + router.router_states_scale * previous)
    first = make_router(1)
    assert first.router_states_scale is None
    assert not any("router_states_scale" in name for name in first.state_dict())
    assert torch.equal(first(x)[2], projected(first, x))
    with pytest.raises(AssertionError, match="did not arrive"):
        router(x)


@pytest.mark.parametrize("output", ["zero", "identity"])
def test_weight_of_a_skipped_token(make_router, output):
    router = make_router(skip_output=output)
    router.balancing_biases[-1] = 5.0
    weights, ids, _ = router(*inputs())
    assert (ids == 4).all()
    assert (weights == 0).all() if output == "zero" else (weights > 0).all()


def test_without_skip_class_there_is_nothing_to_skip_to(make_router):
    router = make_router(moe_skip_expert=False)
    router.balancing_biases[-1] = 5.0
    assert router.out_proj.weight.shape[0] == 4 and len(router.tokens_per_expert) == 5
    assert (router(*inputs())[1] < 4).all()


def test_counts_only_in_training_with_gradients(make_router):
    router = make_router()
    x, previous = inputs()
    with torch.no_grad():
        router(x, previous)
    router.eval()
    router(x, previous)
    assert router.tokens_per_expert.sum() == 0 and router.router_entropy_sum == 0
    router.train()
    _, ids, _ = router(x, previous)
    router(x, previous)
    assert torch.equal(router.tokens_per_expert, 2 * torch.bincount(ids.flatten(), minlength=5))
    assert router.tokens_per_expert.dtype == torch.int64
    mean_entropy = router.router_entropy_sum.item() / 36
    assert 0 < mean_entropy < torch.log(torch.tensor(5.0)).item()


def test_entropy_of_uniform_probabilities_is_log_classes(make_router):
    router = make_router()
    with torch.no_grad():
        router.out_proj.weight.zero_()
    router(*inputs())
    assert router.router_entropy_sum.item() / 18 == pytest.approx(torch.log(torch.tensor(5.0)).item(), rel=1e-6)


@pytest.mark.parametrize("cast", ["bfloat16", "half", "double"])
def test_buffers_survive_casts_exactly(make_router, cast):
    router = make_router()
    router.balancing_biases.copy_(torch.tensor([0.1234567, -0.7654321, 1e-7, 0.0, -1.0]))
    router.balancing_step.fill_(70001)
    before = {name: b.clone() for name, b in router.named_buffers()}
    getattr(router, cast)()
    assert router.fc1.weight.dtype == getattr(torch, cast)
    for name, b in router.named_buffers():
        assert b.dtype == before[name].dtype and torch.equal(b, before[name]), name
    assert router.balancing_biases.dtype == torch.float32


def test_buffers_survive_float16_module(make_model):
    from megatron.core.transformer.module import Float16Module

    model = make_model(bf16=True, params_dtype=torch.bfloat16)
    wrapped = Float16Module(model.config, model)
    routers = [m for m in wrapped.modules() if isinstance(m, ZayaRouter)]
    assert len(routers) == 4
    for router in routers:
        assert router.balancing_biases.dtype == router.router_entropy_sum.dtype == torch.float32
        assert router.fc1.weight.dtype == torch.bfloat16


def test_buffers_leave_the_meta_device(make_config):
    with torch.device("meta"):
        router = ZayaRouter(make_config(perform_initialization=False))
    router.to_empty(device="cpu")
    assert router.balancing_biases.device.type == "cpu" and router.balancing_biases.dtype == torch.float32
    router.bfloat16()
    assert router.balancing_biases.dtype == torch.float32


@pytest.mark.parametrize(
    "wrapped, recompute",
    [(False, dict(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=2)), (True, {})],
)
def test_two_steps_without_balancing_warn_once(make_model, batch, monkeypatch, wrapped, recompute):
    """Two steps of two micro-batches without balancing warn once; after a balanced step the count starts again."""
    monkeypatch.setattr(StepsWithoutBalancing, "warned", False)
    model = make_model(**recompute)
    ddp = DistributedDataParallel(model.config, DistributedDataParallelConfig(), model) if wrapped else model
    ids, positions, labels = batch()

    def step(balance=False):
        ddp.zero_grad_buffer() if wrapped else model.zero_grad()
        for _ in range(2):
            ddp(ids, positions, None, labels=labels).mean().backward()
        for layer in model.decoder.layers if balance else ():
            layer.mlp.router.reset_counts()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for balance in (True, True, False, True, False, False):
            step(balance)
    with pytest.warns(UserWarning, match=r"zaya_plugin\.balance_experts\(\[model\]\)") as found:
        step(), step()
    assert len([each for each in found if "balanced" in str(each.message)]) == 1
