# SPDX-License-Identifier: Apache-2.0
"""Megatron's optimizer factory with MuonAdamW in place of its Adam, for every host that calls `get_megatron_optimizer`.

The factory is Megatron's own (0.19, and 0.16 as Primus pins it). During the call the two classes that it looks up,
`Adam` and `DistributedOptimizer`, are replaced; the chain of its optimizers is then made again. Megatron's registry of
emerging optimizers is not used: it wraps a registered optimizer in the layer-wise optimizer (see
zaya_plugin/optim/sharding/distributed.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate

from zaya_plugin import compat
from zaya_plugin.optim.chained import ChainedMuonAdamW
from zaya_plugin.optim.gradient_buffers import group_layers, skip_zeroing_experts
from zaya_plugin.optim.muon import MuonAdamW, MuonSettings
from zaya_plugin.optim.parameter_role import role_of
from zaya_plugin.optim.sharding.distributed import MuonDistributedOptimizer
from zaya_plugin.patches import hooks

CORE = "megatron.core.optimizer"
Chain = TypeVar("Chain", bound=ChainedMuonAdamW)


def build_muon_adamw(
    get_megatron_optimizer: Callable,
    config,
    model_chunks,
    muon: MuonSettings,
    *,
    non_finite: str | None = None,
    max_non_finite: int | None = None,
    chain: type[Chain] = ChainedMuonAdamW,
    config_overrides=None,
    **named,
) -> Chain:
    """Build MuonAdamW for models with roles, in Megatron's wrappers.

    Args:
        get_megatron_optimizer: Megatron's function.
        config, model_chunks, named: its arguments. AdamW's settings, the learning rate and the weight decay are in
            `config`.
        config_overrides: ignored; Megatron gets those that the roles make.
        muon: settings of Muon.
        non_finite: "skip" skips a step with non-finite gradients on all ranks, "stop" also raises
            NonFiniteGradientsError, None disables the check.
        max_non_finite: with "skip": raise after this number of such steps in a row.
        chain: class of the result.
    """
    overrides = _config_overrides(config, model_chunks)
    group_layers(model_chunks)
    with hooks.replaced(
        {
            f"{CORE}.Adam": functools.partial(MuonAdamW, muon=muon),
            f"{CORE}.DistributedOptimizer": MuonDistributedOptimizer,
            f"{CORE}.USING_PYTORCH_OPTIMIZER": False,
            f"{CORE}.distrib_optimizer.Adam": MuonAdamW,  # 0.16 checks the type of the inner optimizer
        }
    ):
        parts = get_megatron_optimizer(config, model_chunks, config_overrides=overrides, **named).chained_optimizers
    # On every rank, where only experts or no experts are trained; Megatron cannot save such a part.
    parts = [part for part in parts if not getattr(part, "is_stub_optimizer", False)]
    skip_zeroing_experts(model_chunks)
    for optimizer in parts:
        if (group := compat.group_of_experts_norm(optimizer)) is not None:
            hooks.set_attribute("MegatronOptimizer().tp_group", optimizer, group)
        if optimizer.optimizer is not None and not isinstance(optimizer, MuonDistributedOptimizer):
            _tag_copies(optimizer)
            # Megatron's own function would create a second moment for Muon's matrices.
            hooks.set_attribute(
                "MegatronOptimizer().init_state_fn", optimizer, lambda inner, config=None: inner.initialise_state()
            )
            # It looks for a saved group with the settings of each of this run's; the inner optimizer needs none.
            hooks.set_attribute(
                "MegatronOptimizer()._filter_and_reorder_param_groups", optimizer, lambda groups, saved: saved
            )
            described = functools.partial(_described, optimizer.sharded_state_dict)
            hooks.set_attribute("MegatronOptimizer().sharded_state_dict", optimizer, described)
    return chain(parts, model_chunks, non_finite, max_non_finite)


def _described(sharded_state_dict: Callable, model_state: dict, is_loading: bool = False, **named) -> dict:
    """Return the state to write or read. Groups are not compared with the saved ones, whose number may be another."""
    state = sharded_state_dict(model_state, is_loading, **named)
    if is_loading:
        del state.get("optimizer", state)["param_groups"]
    return state


def _config_overrides(config, model_chunks) -> dict:
    """Return Megatron's config_overrides: one parameter group for each pair of multipliers that is not (1, 1)."""
    roles = [(name, role_of(parameter)) for chunk in model_chunks for name, parameter in chunk.named_parameters()]
    for name, role in roles:
        assert role.optimizer is not None, f"{name} has no optimizer: call tag_parameters first"
    overrides = {}
    for lr_mult, weight_decay_mult in dict.fromkeys((role.lr_mult, role.weight_decay_mult) for _, role in roles):
        values = {}
        if lr_mult != 1:
            values.update(max_lr=config.lr * lr_mult, min_lr=(config.min_lr or 0.0) * lr_mult)
        if weight_decay_mult != 1:
            values["wd_mult"] = weight_decay_mult
        if values:
            predicate = ParamPredicate(
                name=f"lr_mult={lr_mult} weight_decay_mult={weight_decay_mult}",
                fn=lambda p, pair=(lr_mult, weight_decay_mult): (
                    (role_of(p).lr_mult, role_of(p).weight_decay_mult) == pair
                ),
            )
            overrides[ParamKey(predicate=predicate)] = values
    return overrides


def load_with_rates(load_checkpoint: Callable, model, optimizer, scheduler, *positional, **named):
    """Load a checkpoint by Megatron's `load_checkpoint`, and return what it returns. Every parameter group keeps its
    highest and lowest learning rate, which hold the multipliers of the recipe.

    Under override_opt_param_scheduler Megatron 0.20 sets both to those of the run for all groups after a load, and the
    multipliers are lost without a message; 0.19 leaves them.
    """
    groups = getattr(optimizer, "param_groups", ())
    before = [{key: group[key] for key in ("max_lr", "min_lr") if key in group} for group in groups]
    loaded = load_checkpoint(model, optimizer, scheduler, *positional, **named)
    groups = getattr(optimizer, "param_groups", ())
    if any(group[key] != value for group, rates in zip(groups, before, strict=True) for key, value in rates.items()):
        for group, rates in zip(groups, before, strict=True):
            group.update(rates)
        scheduler.step(increment=0)
    return loaded


def _tag_copies(optimizer) -> None:
    """Attach the roles to the fp32 copies of a bf16 model, which are separate tensors without the distributed
    optimizer.
    """
    for model_group, main_group in zip(
        getattr(optimizer, "float16_groups", ()), getattr(optimizer, "fp32_from_float16_groups", ()), strict=True
    ):
        for model_param, main_param in zip(model_group, main_group, strict=True):
            main_param.zaya_role = role_of(model_param)
