# SPDX-License-Identifier: Apache-2.0
"""The public API in one process: Muon behind Megatron's interface, and balancing in its step."""

import copy
import importlib

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

import zaya_plugin
from tests.megatron_rank import seed, single_rank  # noqa: F401  (fixtures of every test of this file)
from zaya_plugin import ZayaConfig, balance_experts, build_zaya_model, muon_optimizer, zaya_block_spec
from zaya_plugin.optim.chained import NonFiniteGradientsError
from zaya_plugin.optim.factory import build_muon_adamw
from zaya_plugin.optim.muon import MuonSettings
from zaya_plugin.optim.parameter_role import role_of, tag_parameters

BF16 = dict(bf16=True, params_dtype=torch.bfloat16)
GPT = dict(share_embeddings_and_output_weights=True, position_embedding_type="rope", rotary_percent=0.5)


def make_config():
    return ZayaConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        kv_channels=8,
        moe_ffn_hidden_size=24,
        num_moe_experts=4,
        router_hidden_size=16,
        use_cpu_initialization=True,
        **BF16,
    )


def by_ours():
    torch.manual_seed(3)
    return build_zaya_model(make_config(), vocab_size=64, max_sequence_length=16)


def by_megatron():
    torch.manual_seed(3)
    config = make_config()
    return GPTModel(config, zaya_block_spec(config), vocab_size=64, max_sequence_length=16, **GPT)


def wrapped(model, zero=True):
    options = DistributedDataParallelConfig(use_distributed_optimizer=zero, grad_reduce_in_fp32=True)
    return DistributedDataParallel(model.config, options, model)


def settings(zero=True, **changes):
    return OptimizerConfig(**dict(lr=1e-2, use_distributed_optimizer=zero, **BF16) | changes)


def step(model, optimizer):
    ids = torch.randint(1, 64, (2, 17), generator=torch.Generator().manual_seed(1))
    model.zero_grad_buffer()
    optimizer.zero_grad()
    losses = model(ids[:, :-1], torch.arange(16).expand(2, -1), None, labels=ids[:, 1:])
    losses.mean().backward()
    finalize_model_grads([model])
    return losses.mean().item()


def biases(model):
    return torch.stack([layer.mlp.router.balancing_biases for layer in model.module.decoder.layers])


@pytest.mark.parametrize("zero", [True, False])
def test_a_step_is_muon_and_balancing(zero):
    ours = wrapped(by_ours(), zero)
    optimizer = muon_optimizer(settings(zero), [ours])
    theirs = wrapped(by_ours(), zero)
    parts = build_muon_adamw(get_megatron_optimizer, settings(zero), [theirs], MuonSettings())
    losses = []
    for _ in range(4):
        losses.append(step(ours, optimizer))
        optimizer.step()
        assert step(theirs, parts) == losses[-1]
        statistics = balance_experts([theirs])
        parts.step()
        assert statistics.tokens_per_expert.sum(-1).tolist() == [32, 32]
    assert losses[-1] < losses[0] - 0.3
    others = dict(theirs.named_parameters())
    assert all(torch.equal(p, others[name]) for name, p in ours.named_parameters())
    assert torch.equal(biases(ours), biases(theirs)) and biases(ours)[:, :-1].abs().min() > 0


@pytest.mark.parametrize("zero", [True, False])
def test_a_gpt_model_from_the_spec_trains_too(zero):
    """A GPTModel built from zaya_block_spec, with Megatron's head, has the losses of build_zaya_model within bf16's
    rounding.
    """
    found = []
    for build in (by_ours, by_megatron):
        model = wrapped(build(), zero)
        optimizer = muon_optimizer(settings(zero), [model])
        found.append([])
        for _ in range(3):
            found[-1].append(step(model, optimizer))
            optimizer.step()
    assert found[0] == pytest.approx(found[1], rel=2e-2)
    assert found[1][-1] < found[1][0] - 0.2


def test_overrides_choose_the_optimizer():
    model = wrapped(by_ours())
    muon_optimizer(settings(), [model], overrides=["*.router.* optimizer=adamw lr_mult=0.5"])
    kinds = {name: role_of(p).optimizer for name, p in model.module.named_parameters()}
    assert kinds["decoder.layers.0.mlp.router.fc1.weight"] == "adamw"
    assert kinds["decoder.layers.0.mlp.experts.linear_fc1.weight0"] == "muon"
    again = tag_parameters(model.module)
    assert again["decoder.layers.0.mlp.router.fc1.weight"].optimizer == "muon"


@pytest.mark.parametrize("zero", [True, False])
def test_a_checkpoint_loads_into_other_rates_multipliers_and_betas(zero):
    """NVIDIA/Megatron-LM#963: Megatron looks for a saved group with the very rates of each group of the run."""

    def build(factor, **rates):
        model = wrapped(by_ours(), zero)
        multipliers = [f"*.router.* lr_mult={factor} weight_decay_mult={factor}"]
        return model, muon_optimizer(settings(zero, **rates), [model], overrides=multipliers)

    model, optimizer = build(0.5, min_lr=1e-3)
    for _ in range(2):
        step(model, optimizer)
        optimizer.step()
    model, other = build(0.25, lr=5e-3, min_lr=1e-4, adam_beta1=0.8)
    names = ("max_lr", "min_lr", "wd_mult", "betas", "lr")
    groups = [[group.get(name) for name in names] for group in other.param_groups]
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert [[group.get(name) for name in names] for group in other.param_groups] == groups
    assert (1.25e-3, 2.5e-5, 0.25, (0.8, 0.999)) in {tuple(group[:4]) for group in groups}
    assert {group["step"] for group in other.param_groups} == {2}
    step(model, other)
    assert other.step()[0] and {group["step"] for group in other.param_groups} == {3}


def test_a_gradient_that_is_not_finite_changes_no_weight():
    model = wrapped(by_ours())
    optimizer = muon_optimizer(settings(), [model])
    step(model, optimizer)
    next(model.module.parameters()).main_grad.fill_(float("nan"))
    before = [parameter.clone() for parameter in model.module.parameters()]
    with pytest.raises(NonFiniteGradientsError):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.module.parameters(), strict=True))


def test_mistakes_name_the_mend():
    with pytest.raises(ValueError, match=r"optimizer=sgd: .* Allowed: adam. Fix: OptimizerConfig\(optimizer='adam'"):
        muon_optimizer(settings(optimizer="sgd"), [wrapped(by_ours())])
    with pytest.raises(ValueError, match="model_chunks=GPTModel: .* Fix: wrap it in DistributedDataParallel"):
        muon_optimizer(settings(), [by_megatron()])
    with pytest.raises(ValueError, match="config_overrides: .* Allowed: None. Fix: overrides="):
        muon_optimizer(settings(), [wrapped(by_ours())], config_overrides={"a": {}})
    with pytest.raises(ValueError, match="no parameter matches nothing"):
        muon_optimizer(settings(), [wrapped(by_ours())], overrides=["nothing lr_mult=2"])


def test_every_public_name_is_imported_at_its_first_use():
    for name in zaya_plugin.EXPORTS:
        assert callable(getattr(importlib.import_module("zaya_plugin"), name))
    assert set(zaya_plugin.EXPORTS) <= set(dir(zaya_plugin))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        zaya_plugin.nothing  # noqa: B018
