# SPDX-License-Identifier: Apache-2.0
"""Describe a start for `--dry-run`: a verdict, the plan, and every message with which the start would stop. No torch
import.
"""

import contextlib
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zaya_plugin.checkpoint.run_lock import check_free
from zaya_plugin.config.arguments import megatron_arguments
from zaya_plugin.config.layout import data_parallel_size
from zaya_plugin.config.run_directory import check_resume, written_by
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.sources import find_sources
from zaya_plugin.ground.errors import of_the_machine, without_advice
from zaya_plugin.plan import recipe_plan, run_costs
from zaya_plugin.plan.check import findings_of, step_of, text
from zaya_plugin.run import megatron_check, surroundings
from zaya_plugin.run.rank_plan import WORKER, Plan
from zaya_plugin.run.start_recipe import check_changed_keys, settled, take_over

TOKENIZER_UNKNOWN = "of the data set, which is not on this machine"
MORE = (
    "more         --verbose adds the ranks' command and environment, Megatron's arguments and the tables of both plans"
)


def dry_run(recipe: Recipe, plan: Plan, verbose: bool = False, vocabulary: int | None = None) -> tuple[str, list[str]]:
    """Return what would start, with the verdict first, and the messages with which the run would stop.

    verbose: as in `describe`; vocabulary: as in `stops`.
    """
    problems, unchecked = stops(recipe, plan, vocabulary), unchecked_parts(recipe, plan, vocabulary)
    lines = [
        verdict(problems, unchecked),
        *describe(recipe, plan, verbose=verbose),
        *unchecked,
        *([] if verbose else [MORE]),
    ]
    return "\n".join([*lines, "dry_run=true: nothing was created or started"]), problems


def verdict(problems: Sequence[str], unchecked: Sequence[str]) -> str:
    """Return the first line of a dry run."""
    if problems:
        return f"verdict      does not start: {'; '.join(map(without_advice, problems))}"
    return f"verdict      can start{f' ({unchecked[0]})' if unchecked else ''}"


def describe(recipe: Recipe, plan: Plan, overrides: Sequence[str] = (), *, verbose: bool = False) -> list[str]:
    """Return lines about what would start.

    overrides: the words after `zaya train` on several nodes. verbose: with the environment, Megatron's arguments and
    the tables of both plans.
    """
    if several_nodes(plan):
        plan = replace(plan, command=[*plan.command, *overrides])
    step, chosen = step_of(recipe, plan.world_size), list[str]()
    with contextlib.suppress(ValueError):  # one of the problems of `stops`
        recipe, chosen = settled(recipe, plan.world_size)
    accumulation = recipe.stage.global_batch_size // (
        recipe.stage.micro_batch_size * data_parallel_size(recipe, plan.world_size)
    )
    command = f"command      {shlex.join(plan.command) if plan.command else f'in this process: {WORKER}.main(recipe)'}"
    lines = [
        f"name         {recipe.name}",
        f"run_dir      {os.path.abspath(recipe.run_dir)}",
        f"world size   {plan.world_size} ranks, {plan.local_ranks} on this machine, started by {plan.started_by}",
        *run_costs.cost_lines(step),
        f"batch        {recipe.stage.global_batch_size} sequences of {recipe.stage.seq_length} tokens a step: "
        f"{accumulation} micro-batches of {recipe.stage.micro_batch_size} a data-parallel rank",
        *([command] if verbose or several_nodes(plan) else []),
        *(line.removeprefix("zaya: ") for line in (*chosen, *surroundings.unused(recipe, plan))),
        *recipe_plan.lines(recipe, plan.world_size, verbose),
        *(run_costs.checkpoint_lines(recipe, plan.world_size) if verbose else []),
        *text(findings_of(step)),
    ]
    if verbose:
        variables = (f"{key}={value}" for key, value in sorted(plan.environment.items()))
        lines.append("environment  " + "\n             ".join(variables))
        values = megatron_arguments(recipe, tokenizer_arguments(recipe))
        del values["optimizer"]  # adam for each recipe; the optimizer that Megatron builds for it is replaced
        lines.append(f"Megatron     arguments; the optimizer is optim.name={recipe.optim.name}")
        lines += ["  " + line for line in argument_lines(values)]
    return lines


def stops(recipe: Recipe, plan: Plan, vocabulary: int | None = None) -> list[str]:
    """Return the messages with which a run would stop: before its ranks start, or by Megatron's validation in them.

    Where the run's nodes are other machines than this one (`is_elsewhere`), this one's devices and packages are not
    checked, and its data only where this machine has it too.

    vocabulary: of random tokens, in place of data.
    """
    try:
        chosen = settled(recipe, plan.world_size)[0]
    except ValueError as error:  # no recomputation makes it fit
        return [str(error)]
    checks = [lambda: check_free(written_by(recipe))] if plan.rank == 0 else []
    checks += [lambda: check_resume(recipe), lambda: check_changed_keys(chosen, plan), lambda: take_over(recipe)]
    if not several_nodes(plan):
        checks.append(lambda: surroundings.check_directories(recipe))
    if not is_elsewhere(recipe, plan):
        checks.append(lambda: surroundings.check_surroundings(chosen, plan, vocabulary))
    else:
        checks.append(lambda: surroundings.check_memory(chosen, plan, vocabulary))
        if vocabulary is None and surroundings.missing_data(recipe) is None:
            checks.append(lambda: surroundings.check_data(recipe))
    checks.append(lambda: megatron_check.check(chosen, plan))
    texts = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            texts.append(str(error))
        except OSError as error:
            if (text := of_the_machine(error, recipe.run_dir)) is None:
                raise
            texts.append(text)
    return list(dict.fromkeys(texts))


def unchecked_parts(recipe: Recipe, plan: Plan, vocabulary: int | None = None) -> list[str]:
    """Return lines about what a dry run on this machine does not check."""
    lines = []
    if is_elsewhere(recipe, plan):
        missing = None if vocabulary else surroundings.missing_data(recipe)
        lines.append("not checked: devices and packages of the nodes" + (", and data" if missing else ""))
        lines += [f"not checked: data, which this machine lacks: {without_advice(missing)}"] if missing else []
    if (why := megatron_check.skipped()) is not None:
        lines.append(f"not checked: Megatron's own validation of its arguments: {why}")
    return lines


def several_nodes(plan: Plan) -> bool:
    """Return whether the plan is one of `make_plan` for every node of a run."""
    return plan.command is not None and plan.command[0] == "torchrun"


def is_elsewhere(recipe: Recipe, plan: Plan) -> bool:
    """Return whether a dry run on this machine is about others: the run has several nodes, or devices and this machine
    has none.
    """
    return several_nodes(plan) or recipe.cluster.device == "cuda" and not surroundings.has_device_files()


def tokenizer_arguments(recipe: Recipe) -> dict:
    """Return Megatron's arguments for the tokenizer: those of the data set, or the recipe's where the data is on
    another machine.
    """
    try:
        return find_sources(recipe).tokenizer_arguments()
    except ValueError:
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": recipe.data.tokenizer or TOKENIZER_UNKNOWN}


def argument_lines(values: Mapping[str, object]) -> list[str]:
    """Return Megatron's arguments as lines `--name value`, sorted by name. Values are JSON, which has one form for
    lists and null.
    """
    return [f"--{name.replace('_', '-')} {json.dumps(value, default=str)}" for name, value in sorted(values.items())]
