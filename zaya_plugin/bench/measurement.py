# SPDX-License-Identifier: Apache-2.0
"""Start the ranks that measure: a recipe's step, its loader, or collectives. No torch import."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zaya_plugin.bench.options import Options, measured_recipe, with_data_path
from zaya_plugin.ground.errors import mistake

if TYPE_CHECKING:
    from zaya_plugin.config.schema import Recipe
    from zaya_plugin.run.rank_plan import Plan

RANK = "zaya_plugin.bench.rank"


def recipe_of(options: Options, output: str | None, overrides: list[str]) -> Recipe:
    """Return the recipe that is measured."""
    from zaya_plugin.handover.published import compose_published

    if options.random_tokens:
        overrides = with_data_path(overrides)
    return measured_recipe(compose_published(overrides), options, output)


def run(recipe: Recipe, module: str, options: dict[str, Any]) -> int:
    """Start the ranks of a recipe's step or loader, or become the one that an outer launcher has started; return the
    exit code. module, options: of zaya_plugin.bench.rank.
    """
    from zaya_plugin.run.launch import launch
    from zaya_plugin.run.rank_plan import make_plan

    plan = make_plan(recipe, os.environ, (RANK, module, json.dumps(options)))
    vocabulary = options.get("random_tokens") or None
    return launch(recipe, verbose=True, plan=plan, vocabulary=vocabulary, run=_run_ranks)


def run_collectives(recipe: Recipe, options: dict[str, Any]) -> int:
    """Do the same for a sweep of collectives, whose ranks need neither a model nor data."""
    from zaya_plugin.config.compose import save_recipe
    from zaya_plugin.config.run_directory import make_writable
    from zaya_plugin.run.rank_plan import unchecked_plan

    plan = unchecked_plan(recipe, os.environ, (RANK, "collectives_rank", json.dumps(options)))
    if plan.world_size < 2:
        problem = "a collective needs two ranks"
        raise mistake("nproc", plan.world_size, problem=problem, allowed="2 or more", fix="nproc=2")
    make_writable(recipe.run_dir)
    if plan.command is not None:
        save_recipe(recipe, Path(recipe.run_dir) / "recipe.yaml")
    return _run_ranks(recipe, plan)


def _run_ranks(recipe: Recipe, plan: Plan) -> int:
    from zaya_plugin.run import launch

    if plan.command is None:
        return launch.become_rank(recipe, plan)
    return launch.run_ranks(plan, Path(recipe.run_dir) / "logs").code
