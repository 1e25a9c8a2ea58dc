# SPDX-License-Identifier: Apache-2.0
"""Megatron's optimizer factory with ours in place of its Adam: works wherever `get_megatron_optimizer` builds the optimizer.

The factory is Megatron's own (0.19, and 0.16 as Primus pins it): for the time of the call three names that it looks up,
`Adam`, `DistributedOptimizer` and `ChainedOptimizer`, are ours. Its registry of emerging optimizers is no way in: what is registered there
gets the layer-wise optimizer (see zaya_plugin/optim/sharding/distributed.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import nn

from zaya_plugin import compat
from zaya_plugin.config.optimizer_override import Override
from zaya_plugin.optim.chained import ChainedMuonAdamW
from zaya_plugin.optim.grouping import Assignment, assign
from zaya_plugin.optim.muon import MuonAdamW, MuonSettings
from zaya_plugin.optim.sharding.distributed import MuonDistributedOptimizer
from zaya_plugin.optim.written_gradients import spare_zeroing
from zaya_plugin.patches.hooks import replaced

CORE = "megatron.core.optimizer"


def tag_parameters(
    model: nn.Module, overrides: Iterable[Override] = (), split_gate_up: bool = False, default: str = "muon"
) -> dict[str, Assignment]:
    """Writes each parameter's assignment onto it, before DDP lays out its buffers; returns all by name.

    Raises:
        ValueError: as `zaya_plugin.optim.grouping.assign`.
    """
    parameters = dict(model.named_parameters())
    assignments = assign(parameters.items(), overrides, split_gate_up, default)
    for name, assignment in assignments.items():
        parameters[name].optimizer_assignment = assignment
        if assignment.matrices is not None:
            parameters[name].muon_matrices = assignment.matrices
        elif hasattr(parameters[name], "muon_matrices"):
            del parameters[name].muon_matrices
    return assignments


def muon_factory(get_megatron_optimizer: Callable, muon: MuonSettings, non_finite: str | None = None) -> Callable:
    """A function with the signature of `get_megatron_optimizer` that builds MuonAdamW for tagged models.

    Args:
        get_megatron_optimizer: Megatron's.
        muon: settings of Muon; AdamW's, the learning rate and the weight decay are Megatron's arguments.
        non_finite: a step whose gradients are not finite is left out on all ranks, and then "skip": goes on, "stop": raises; None: not looked for.
    """

    def adam(params, **settings):
        return MuonAdamW(params, muon, **settings)

    def factory(config, model_chunks, config_overrides=None, **named):
        overrides = _config_overrides(config, model_chunks)
        with replaced(
            {
                f"{CORE}.Adam": adam,
                f"{CORE}.DistributedOptimizer": MuonDistributedOptimizer,
                f"{CORE}.ChainedOptimizer": ChainedMuonAdamW,
                f"{CORE}.USING_PYTORCH_OPTIMIZER": False,
                f"{CORE}.distrib_optimizer.Adam": MuonAdamW,  # 0.16 checks the type that it is given
            }
        ):
            chained = get_megatron_optimizer(config, model_chunks, config_overrides=overrides, **named)
        chained.non_finite = non_finite
        chained.defer_scaling(model_chunks)
        spare_zeroing(model_chunks)
        for optimizer in chained.chained_optimizers:
            compat.count_experts_in_norm(optimizer)
            if optimizer.optimizer is not None and not isinstance(optimizer, MuonDistributedOptimizer):
                _tag_copies(optimizer)
                # Megatron's own would give Muon's matrices a second moment.
                optimizer.init_state_fn = lambda inner, config=None: inner.initialise_state()
        return chained

    return factory


def _config_overrides(config, model_chunks) -> dict:
    """Megatron's parameter groups from the assignments: one for each pair of multipliers that is not (1, 1)."""
    pairs: dict[tuple[float, float], None] = {}  # a set that keeps the order of the parameters
    for chunk in model_chunks:
        for name, parameter in chunk.named_parameters():
            assert hasattr(parameter, "optimizer_assignment"), f"{name} has no optimizer: call tag_parameters first"
            pairs[_multipliers(parameter)] = None
    overrides = {}
    for lr_mult, weight_decay_mult in pairs:
        values = {}
        if lr_mult != 1:
            values.update(max_lr=config.lr * lr_mult, min_lr=(config.min_lr or 0.0) * lr_mult)
        if weight_decay_mult != 1:
            values["wd_mult"] = weight_decay_mult
        if values:
            predicate = ParamPredicate(
                name=f"lr_mult={lr_mult} weight_decay_mult={weight_decay_mult}",
                fn=lambda p, pair=(lr_mult, weight_decay_mult): _multipliers(p) == pair,
            )
            overrides[ParamKey(predicate=predicate)] = values
    return overrides


def _multipliers(parameter: nn.Parameter) -> tuple[float, float]:
    """Of the learning rate and the weight decay."""
    return parameter.optimizer_assignment.lr_mult, parameter.optimizer_assignment.weight_decay_mult


def _tag_copies(optimizer) -> None:
    """Without the distributed optimizer a bf16 model's fp32 copies are tensors of their own."""
    for model_group, main_group in zip(
        getattr(optimizer, "float16_groups", ()), getattr(optimizer, "fp32_from_float16_groups", ()), strict=True
    ):
        for model_param, main_param in zip(model_group, main_group, strict=True):
            if hasattr(model_param, "muon_matrices"):
                main_param.muon_matrices = model_param.muon_matrices
