# SPDX-License-Identifier: Apache-2.0
"""Expert-bias balancing against torch.optim.AdamW, over counts that two processes share."""

from types import SimpleNamespace

import pytest
import torch

from zaya_plugin.model.router import ZayaRouter
from zaya_plugin.optim.balancing import RouterStatistics, update_biases


@pytest.fixture
def group(tmp_path):
    """A process group of one rank; an existing one is used."""
    made = not torch.distributed.is_initialized()
    if made:
        store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield torch.distributed.group.WORLD
    if made:
        torch.distributed.destroy_process_group()


def _config(**changes):
    values = dict(
        balancing_lr=1e-3, balancing_beta1=0.9, balancing_beta2=0.999, balancing_eps=1e-8, balancing_centering=False
    )
    return SimpleNamespace(lora_rank=None, **(values | changes))


class _Router(SimpleNamespace):
    reset_counts = ZayaRouter.reset_counts


def _router(experts=16):
    zeros = torch.zeros(experts + 1)
    biases = zeros.clone()
    biases[-1] = -1.0
    return _Router(
        balancing_biases=biases,
        balancing_exp_avg=zeros.clone(),
        balancing_exp_avg_sq=zeros.clone(),
        balancing_step=torch.zeros((), dtype=torch.int64),
        tokens_per_expert=torch.zeros(experts + 1, dtype=torch.int64),
        router_entropy_sum=torch.zeros(()),
    )


@pytest.mark.parametrize("options", [{}, dict(balancing_lr=1e-2, balancing_beta1=0.5, balancing_beta2=0.95)])
def test_equals_torch_adamw_on_the_stated_gradient(group, options):
    config, routers = _config(**options), [_router() for _ in range(3)]
    oracle = [torch.nn.Parameter(torch.zeros(16)) for _ in routers]
    optimizer = torch.optim.AdamW(
        oracle,
        lr=config.balancing_lr,
        betas=(config.balancing_beta1, config.balancing_beta2),
        eps=config.balancing_eps,
        weight_decay=0.0,
    )
    generator = torch.Generator().manual_seed(3)
    for _ in range(25):
        for router, parameter in zip(routers, oracle, strict=True):
            counts = torch.randint(0, 100, (17,), generator=generator)
            router.tokens_per_expert.copy_(counts)
            parameter.grad = (counts[:16].double() / counts.sum() - 1 / 16).float()
        optimizer.step()
        statistics = update_biases(routers, config, group)
        assert torch.equal(statistics.tokens_per_expert[2], counts)
    for router, parameter in zip(routers, oracle, strict=True):
        assert torch.allclose(router.balancing_biases[:16], parameter, rtol=1e-5, atol=1e-8)
        assert router.balancing_biases[16] == -1.0, "the skip class is frozen"
        assert router.balancing_step == 25
        assert not router.tokens_per_expert.any() and not router.router_entropy_sum


def test_the_bias_of_a_loaded_expert_falls(group):
    router = _router()
    router.tokens_per_expert[3] = 1000
    update_biases([router], _config(), group)
    assert router.balancing_biases[3] == pytest.approx(-1e-3) and router.balancing_biases[0] == pytest.approx(1e-3)


def test_centering_keeps_the_experts_at_zero_mean(group):
    router = _router()
    router.tokens_per_expert[3] = 1000
    update_biases([router], _config(balancing_centering=True), group)
    assert router.balancing_biases[:16].mean().abs() < 1e-9 and router.balancing_biases[16] == -1.0


def test_counts_are_exact_beyond_float32(group):
    router = _router()
    router.tokens_per_expert[:] = 2**31 + 1
    statistics = update_biases([router], _config(), group)
    assert statistics.tokens_per_expert[0, 0] == 2**31 + 1


def test_a_step_without_tokens_is_harmless(group):
    statistics = update_biases([_router()], _config(), group)
    assert torch.isfinite(statistics.load_entropy).all() and torch.isfinite(statistics.entropy).all()


def test_statistics():
    even = RouterStatistics(torch.tensor([[5, 5, 5, 5, 100]]), torch.zeros(1))
    collapsed = RouterStatistics(torch.tensor([[20, 0, 0, 0, 0]]), torch.zeros(1))
    assert even.load_entropy == pytest.approx(1.0) and even.imbalance == pytest.approx(1.0)
    assert collapsed.load_entropy == pytest.approx(0.0, abs=1e-6) and collapsed.imbalance == pytest.approx(4.0)
