# SPDX-License-Identifier: Apache-2.0
"""What a command would start, without starting it: the launch, the ranks' environment and Megatron's arguments. No torch import.

A dry run is made where people plan: a login node has neither the nodes nor the data, so what is missing is said, not refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from zaya_plugin.config.schema import Recipe
from zaya_plugin.training import launch, memory_plan
from zaya_plugin.training.arguments import megatron_arguments

TOKENIZER_UNKNOWN = "of the data set, which is not here"


def plan_of(recipe: Recipe, environ: Mapping[str, str]) -> launch.Plan:
    """The launch on this machine, or for several nodes the one that every node does."""
    if recipe.cluster.num_nodes == 1 or any(name in environ for name in ("RANK", "SLURM_PROCID")):
        return launch.make_plan(recipe, environ)
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
    variables = launch.rank_environment(recipe, here, environ)
    return launch.Plan(
        recipe.cluster.num_nodes * here, here, 0, "torchrun on every node, or `zaya slurm`", words, variables
    )


def describe(recipe: Recipe, plan: launch.Plan, overrides: Sequence[str] = ()) -> str:
    """Everything as text; overrides: the words after `zaya train` on several nodes."""
    if plan.command is not None and plan.command[0] == "torchrun":
        plan = launch.Plan(**{**vars(plan), "command": [*plan.command, *overrides]})
    recipe, chosen = launch.settled(recipe, plan.world_size)
    memory = [*chosen, *memory_plan.lines(recipe, plan.world_size)]
    values = megatron_arguments(recipe, tokenizer_arguments(recipe))
    return launch.describe(
        recipe, plan, [*memory, "Megatron     arguments", *("  " + line for line in argument_lines(values))]
    )


def tokenizer_arguments(recipe: Recipe) -> dict:
    """Of the data set, where it is here."""
    from zaya_plugin.training.datasets import find_sources

    try:
        return find_sources(recipe).tokenizer_arguments()
    except ValueError:
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": recipe.data.tokenizer or TOKENIZER_UNKNOWN}


def argument_lines(values: Mapping[str, object]) -> list[str]:
    """Megatron arguments as `--name value`, by name; JSON values, since a list or null has no other one form."""
    return [f"--{name.replace('_', '-')} {json.dumps(_plain(value))}" for name, value in sorted(values.items())]


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value
