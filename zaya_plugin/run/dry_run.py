# SPDX-License-Identifier: Apache-2.0
"""What a command would start, without starting it: the launch, the ranks' environment and Megatron's arguments. No torch import.

A dry run is made where people plan: a login node has neither the nodes nor the data, so what is missing is said, not refused.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from zaya_plugin.config.arguments import megatron_arguments
from zaya_plugin.config.run_directory import check_resume
from zaya_plugin.config.schema import Recipe
from zaya_plugin.config.validate import data_parallel_size
from zaya_plugin.plan import recipe_plan
from zaya_plugin.run.before_start import check_surroundings, settled, take_over
from zaya_plugin.run.rank_plan import WORKER, Plan, make_plan, rank_environment

TOKENIZER_UNKNOWN = "of the data set, which is not here"


def plan_of(recipe: Recipe, environ: Mapping[str, str]) -> Plan:
    """The launch on this machine, or for several nodes the one that every node does."""
    if recipe.cluster.num_nodes == 1 or any(name in environ for name in ("RANK", "SLURM_PROCID")):
        return make_plan(recipe, environ)
    here = recipe.cluster.gpus_per_node
    words = [
        "torchrun",
        "--nnodes",
        str(recipe.cluster.num_nodes),
        "--nproc-per-node",
        str(here),
        "--rdzv-backend",
        "c10d",
    ]
    words += ["--rdzv-endpoint", "<first host>:29500", "-m", "zaya_plugin.cli", "train"]
    variables = rank_environment(recipe, here, environ)
    return Plan(recipe.cluster.num_nodes * here, here, 0, "torchrun on every node, or `zaya slurm`", words, variables)


def describe(recipe: Recipe, plan: Plan, overrides: Sequence[str] = ()) -> str:
    """Everything as text; overrides: the words after `zaya train` on several nodes."""
    if plan.command is not None and plan.command[0] == "torchrun":
        plan = Plan(**{**vars(plan), "command": [*plan.command, *overrides]})
    recipe, chosen = settled(recipe, plan.world_size)
    memory = [*chosen, *recipe_plan.lines(recipe, plan.world_size)]
    values = megatron_arguments(recipe, tokenizer_arguments(recipe))
    return _text(recipe, plan, [*memory, "Megatron     arguments", *("  " + line for line in argument_lines(values))])


def _text(recipe: Recipe, plan: Plan, more: Sequence[str] = ()) -> str:
    """What would run, and `more` lines; says too what would stop it now."""
    accumulation = recipe.stage.global_batch_size // (
        recipe.stage.micro_batch_size * data_parallel_size(recipe, plan.world_size)
    )
    lines = [
        f"name         {recipe.name}",
        f"run_dir      {os.path.abspath(recipe.run_dir)}",
        f"world size   {plan.world_size} ranks, {plan.ranks_here} on this machine, started by {plan.started_by}",
        f"batch        {recipe.stage.global_batch_size} sequences of {recipe.stage.seq_length} tokens a step: "
        f"{accumulation} micro-batches of {recipe.stage.micro_batch_size} a data-parallel rank",
        f"command      {shlex.join(plan.command) if plan.command else f'in this process: {WORKER}.main(recipe)'}",
        "environment  " + "\n             ".join(f"{key}={value}" for key, value in sorted(plan.environment.items())),
    ]
    for check in (
        lambda: check_resume(recipe.run_dir, recipe.resume),
        lambda: take_over(recipe),
        lambda: check_surroundings(recipe, plan),
    ):
        try:
            check()
        except ValueError as error:
            lines.append(f"would stop   {error}")
    return "\n".join([*lines, *more, "dry_run = true: nothing was created or started"])


def tokenizer_arguments(recipe: Recipe) -> dict:
    """Of the data set, where it is here."""
    from zaya_plugin.data.sources import find_sources

    try:
        return find_sources(recipe).tokenizer_arguments()
    except ValueError:
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": recipe.data.tokenizer or TOKENIZER_UNKNOWN}


def argument_lines(values: Mapping[str, object]) -> list[str]:
    """Megatron arguments as `--name value`, by name; JSON values, since a list or null has no other one form."""
    return [f"--{name.replace('_', '-')} {json.dumps(_plain(value))}" for name, value in sorted(values.items())]


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
