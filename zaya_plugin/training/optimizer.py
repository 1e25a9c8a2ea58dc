# SPDX-License-Identifier: Apache-2.0
"""From the `optim` group of a recipe to the optimizer: the parameters' roles, and Megatron's factory with MuonAdamW
inside.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from zaya_plugin.config.entries import Override
from zaya_plugin.config.schema import Recipe
from zaya_plugin.optim.factory import muon_factory, tag_parameters
from zaya_plugin.optim.muon import MuonSettings
from zaya_plugin.optim.parameter_role import ParameterRole


def assign_optimizers(recipe: Recipe, model: nn.Module, part_of: str | None = None) -> dict[str, ParameterRole]:
    """Attach the roles of the parameters of `model`, before DDP wraps it; return them by name.

    part_of: the prefix of the parameters' names, if `model` is a part of a model. A host that builds the model itself
    lays out its buffers, which depend on the roles, before the whole model can be passed here.

    Raises:
        ValueError: see `zaya_plugin.optim.grouping.assign`.
    """
    overrides = [Override.parse(entry) for entry in recipe.optim.overrides]
    return tag_parameters(model, overrides, recipe.optim.muon_split_gate_up, recipe.optim.name, part_of)


def muon_settings(recipe: Recipe) -> MuonSettings:
    """Return Muon's settings of `recipe`."""
    optim = recipe.optim
    return MuonSettings(
        momentum=optim.muon_momentum,
        nesterov=optim.muon_nesterov,
        steps=optim.muon_steps,
        coefficients=optim.muon_coefficients,
        dtype=optim.muon_dtype,
        rms_scale=optim.muon_rms_scale,
        momentum_dtype=optim.muon_momentum_dtype,
    )


def optimizer_factory(recipe: Recipe) -> Callable:
    """Return the replacement of Megatron's `get_megatron_optimizer` for a run of `recipe`; its first argument is that
    function.
    """
    non_finite = recipe.optim.non_finite_gradients if recipe.parallel.use_distributed_optimizer else None
    limit = recipe.optim.max_non_finite_steps if non_finite == "skip" else None

    def factory(get_megatron_optimizer, *positional, **named):
        return muon_factory(get_megatron_optimizer, muon_settings(recipe), non_finite, limit)(*positional, **named)

    return factory
