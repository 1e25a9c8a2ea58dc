# SPDX-License-Identifier: Apache-2.0
"""Make the recipe that a start runs: values for `auto`, what it takes over from an earlier start or stage, and the
changes with which a run cannot resume. No torch import.
"""

import math
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zaya_plugin.checkpoint import manifest, on_disk
from zaya_plugin.checkpoint.convert.model_folder import resolve
from zaya_plugin.config.megatron_review import unchecked_lines
from zaya_plugin.config.resume import changes, values_in
from zaya_plugin.config.run_directory import checkpoint_path, has_checkpoint
from zaya_plugin.config.schedule import learning_rate, samples_until, step_count
from zaya_plugin.config.schema import LENGTH, ROUNDING, SCHEDULE, STEPS_TO_TRAIN, Recipe, leaves, with_values
from zaya_plugin.config.validate import with_graphs
from zaya_plugin.ground.errors import as_typed
from zaya_plugin.handover.data_places import with_consumed
from zaya_plugin.handover.predecessor import predecessor, saved_step
from zaya_plugin.plan import recipe_plan, run_costs
from zaya_plugin.plan.bucket_plan import KEYS, with_bucket_plan
from zaya_plugin.plan.check import findings_of, step_of
from zaya_plugin.run.rank_plan import Plan
from zaya_plugin.run.surroundings import unused

SCHEDULE_KEYS = {path for path, field in leaves() if field.metadata["resume"] in (LENGTH, SCHEDULE, STEPS_TO_TRAIN)}
# NCCL's watchdog ends a rank from C++, and `launch.without_graphs` is then not reached
IF_ABORTED = (
    "cluster.graphs={}: one graph a step. If a rank is aborted while the first step is captured, add "
    "cluster.graphs=none to the command of all ranks"
)


def with_choices(recipe: Recipe, plan: Plan) -> Recipe:
    """Return `recipe` with values for `auto` (see `settled`); rank 0 prints them."""
    recipe, lines = settled(recipe, plan.world_size)
    if plan.rank == 0:
        if plan.command is None and recipe.cluster.graphs != "none":
            lines.append(IF_ABORTED.format(recipe.cluster.graphs))
        for line in [*lines, *unused(recipe, plan)]:
            print(line, flush=True)
    return recipe


def cost_lines(recipe: Recipe, plan: Plan) -> list[str]:
    """Return lines about what the run takes, and the number of findings about the recipe as composed."""
    step = step_of(recipe, plan.world_size)
    number = len(findings_of(step))
    count = [f"findings     {number}: `zaya plan check` with the same words prints them"] if number else []
    return [f"zaya: {line}" for line in (*run_costs.cost_lines(step), *count)]


def settled(recipe: Recipe, world_size: int) -> tuple[Recipe, list[str]]:
    """Return `recipe` with the values of parallel.bucket_plan, and for `auto` in parallel.recompute_granularity and
    cluster.graphs, and lines that name them.
    """
    recipe, buckets = with_bucket_plan(recipe, world_size)
    recipe, recomputed = recipe_plan.with_recompute(recipe, world_size)
    recipe, graphs = with_graphs(recipe)
    return recipe, [line for line in (buckets, recomputed, graphs, *unchecked_lines(recipe)) if line is not None]


def take_over(recipe: Recipe) -> Recipe:
    """Return `recipe` with its place in the data and the vocabulary's padding of the run that it continues; raises
    ValueError if a new stage cannot start from `handover.from_run` or `handover.from_hf`. Fetches the latter's files.
    """
    if saved_step(Path(recipe.run_dir)) is None:
        predecessor(recipe)
        if recipe.handover.from_hf is not None:
            resolve(recipe.handover.from_hf, key="handover.from_hf")
    return with_consumed(with_padding(recipe))


def with_padding(recipe: Recipe) -> Recipe:
    """Return `recipe` with model.make_vocab_size_divisible_by of the run that it resumes or takes over: its tables have
    that many rows, also where today's default is another one.
    """
    before = values_in(recipe.run_dir) if saved_step(Path(recipe.run_dir)) is not None else {}
    if not before and recipe.handover.from_run is not None:
        before = values_in(recipe.handover.from_run)
    if not before:
        return recipe
    divisor = before.get("model.make_vocab_size_divisible_by", 64)
    return replace(recipe, model=replace(recipe.model, make_vocab_size_divisible_by=divisor))


def check_changed_keys(recipe: Recipe, plan: Plan) -> None:
    """Raise ValueError for changes of the recipe that a run cannot resume with; rank 0 prints the others."""
    refused, warned = changed_keys(recipe)
    if refused:
        raise ValueError("\n".join(refused))
    if plan.rank == 0:
        for line in warned:
            print(line, file=sys.stderr, flush=True)


def changed_keys(recipe: Recipe) -> tuple[list[str], list[str]]:
    """Return messages about changes of the recipe that a run cannot resume with, and lines about those that it can;
    both empty for a new run or stage.

    Compared is the recipe that the newest complete checkpoint keeps, or run_dir/recipe.yaml where an earlier version
    wrote it.
    """
    directory = checkpoint_path(recipe)
    if recipe.resume == "never" or not has_checkpoint(directory):
        return [], []
    folder, facts = on_disk.newest_facts(directory)
    before = facts.get(manifest.RECIPE) or values_in(recipe.run_dir)
    refused, warned = changes(before, recipe, recipe.run_dir)
    if recipe.parallel.bucket_plan is not None:  # a key that was typed may change without a word, a file may not
        for key in KEYS:
            was, now = before.get(f"parallel.{key}"), getattr(recipe.parallel, key)
            if was != now:
                warned.append(f"zaya: resume: parallel.{key}: was {as_typed(was)}, is {now}; {ROUNDING.why}")
    return refused, [*warned, *(resume_lines(before, recipe, on_disk.iteration_of(folder)) if facts else ())]


def resume_lines(before: Mapping[str, Any], recipe: Recipe, step: int) -> list[str]:
    """Return a line about a run that has no step left behind the checkpoint of `step`, or about the learning rate of
    the next step if the recipe before had another one for it. before: its values by key.
    """
    if step >= (steps := step_count(recipe)):
        return [
            f"zaya: resume: the newest checkpoint is of step {step}, and the recipe has {steps} steps "
            f"(stage.train_iters={recipe.stage.train_iters}): none is left. The run trains nothing and ends with exit "
            f"code 0; with a larger stage.train_iters it continues"
        ]
    try:
        earlier = with_values(recipe, {key: before[key] for key in SCHEDULE_KEYS & before.keys()})
        samples = samples_until(earlier, step)
        was, now = learning_rate(earlier, samples), learning_rate(recipe, samples)
    except (ValueError, TypeError, ArithmeticError):  # values of another version
        return []
    if math.isclose(was, now, rel_tol=1e-6):
        return []
    return [f"zaya: resume: the learning rate of step {step + 1} is {now:.4g}; the recipe before had {was:.4g}"]
