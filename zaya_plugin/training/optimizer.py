# SPDX-License-Identifier: Apache-2.0
"""From the `optim` group of a recipe to the optimizer: the parameters' roles, and Megatron's factory with MuonAdamW
inside.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from zaya_plugin.config.entries import Override
from zaya_plugin.config.schema import Recipe
from zaya_plugin.optim.chained import ChainedMuonAdamW
from zaya_plugin.optim.factory import build_muon_adamw
from zaya_plugin.optim.muon import MuonSettings
from zaya_plugin.optim.parameter_role import ParameterRole, tag_parameters


def assign_optimizers(recipe: Recipe, model: nn.Module) -> dict[str, ParameterRole]:
    """Attach the roles of the parameters of `model`, before DDP wraps it; return them by name.

    Raises:
        ValueError: see `zaya_plugin.optim.parameter_role.assign`.
    """
    overrides = [Override.parse(entry) for entry in recipe.optim.overrides]
    return tag_parameters(model, overrides, recipe.optim.muon_split_gate_up, recipe.optim.name)


def build_optimizer(recipe: Recipe, get_megatron_optimizer: Callable, *positional, **named) -> ChainedMuonAdamW:
    """Build the recipe's optimizer; arguments as of Megatron's `get_megatron_optimizer`."""
    optim = recipe.optim
    muon = MuonSettings(
        momentum=optim.muon_momentum,
        nesterov=optim.muon_nesterov,
        steps=optim.muon_steps,
        coefficients=optim.muon_coefficients,
        dtype=optim.muon_dtype,
        rms_scale=optim.muon_rms_scale,
        momentum_dtype=optim.muon_momentum_dtype,
    )
    non_finite = optim.non_finite_gradients if recipe.parallel.use_distributed_optimizer else None
    limit = optim.max_non_finite_steps if non_finite == "skip" else None
    settings = dict(muon=muon, non_finite=non_finite, max_non_finite=limit)
    return build_muon_adamw(get_megatron_optimizer, *positional, **settings, **named)
