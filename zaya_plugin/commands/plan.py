# SPDX-License-Identifier: Apache-2.0
"""`zaya plan ...`: what a recipe needs, before an hour of a device is spent. No torch import."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

from zaya_plugin.commands.parser import Parser, option
from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.exit_codes import USER_ERROR
from zaya_plugin.ground.option_numbers import INT32, whole_number

CHECK = """\
Checks a recipe by rules: sizes, memory, matrix products, collectives, layout, hazards of many ranks, checkpoints.

Each finding says what it is, why and by which source, which overrides to type, and their predicted effect. Needs no
data and no device. docs/plan.md has the table of rules."""
CHECK_EXAMPLES = """\
examples:
  zaya plan check experiment=zaya1_base cluster=mi300x_128x8
  zaya plan check experiment=zaya1_base cluster=mi300x_8 model.moe_ffn_hidden_size=4000 --json

Exit codes: 0, with findings or without; 2, the step does not fit into the memory, or a mistake in the recipe."""
RUN = """\
Predicts the step of a recipe: parameters, operations, memory by component, time by part, communication.

Without --from the prediction starts from speeds that were fitted to committed records of H200s; with it from the
step.json of `zaya bench step`, and without recipe keys the step is that of the recorded recipe. Each part keeps the
share of its roofline; collectives take the rates of the cluster's links (recipe keys machine.*). docs/plan.md compares
predictions with measured steps."""
RUN_EXAMPLES = """\
examples:
  zaya plan run experiment=zaya1_base cluster=h200_8
  zaya plan run --from step.json experiment=zaya1_base cluster=mi300x_8 stage.micro_batch_size=4 \\
    stage.global_batch_size=128
  zaya plan run experiment=zaya1_base cluster=mi300x_128x8 --output plan.json"""

# Rows that several of the commands share.
GPUS = option("--gpus", type=whole_number(1, INT32), metavar="N", help="devices (default: those of the recipe)")


def check() -> Parser:
    as_json = option("--json", action="store_true", help="print the findings as JSON")
    return Parser("plan check", _check, CHECK, CHECK_EXAMPLES, GPUS, as_json, recipe=True)


def run() -> Parser:
    return Parser(
        "plan run",
        _run,
        RUN,
        RUN_EXAMPLES,
        GPUS,
        option("--from", dest="record", type=Path, metavar="STEP_JSON", help="record of `zaya bench step`"),
        option("--output", type=Path, metavar="FILE", help="also write the prediction as JSON"),
        recipe=True,
    )


def composed(overrides: list[str], gpus: int | None) -> tuple[Recipe, int]:
    """Return the recipe of `overrides`, on `gpus` devices if given, and the number of its ranks."""
    from zaya_plugin.bench.options import with_data_path
    from zaya_plugin.config.compose import compose
    from zaya_plugin.config.validate import validate
    from zaya_plugin.run.rank_plan import planned_ranks

    recipe = compose(with_data_path(overrides))
    if gpus:
        recipe = on_devices(recipe, gpus)
    world = planned_ranks(recipe)
    validate(recipe, world)
    return recipe, world


def on_devices(recipe: Recipe, gpus: int) -> Recipe:
    """Return the recipe on `gpus` devices: whole nodes, or a part of one."""
    from zaya_plugin.ground.errors import mistake

    node = recipe.cluster.gpus_per_node
    if gpus > node and gpus % node:
        raise mistake(
            "--gpus", gpus, problem=f"is not a number of whole nodes of {node}", allowed=f"a multiple of {node}"
        )
    cluster = replace(recipe.cluster, num_nodes=max(1, gpus // node), gpus_per_node=min(gpus, node), numa_nodes=[])
    return replace(recipe, cluster=cluster, nproc=None)


def _check(options: argparse.Namespace) -> int:
    from zaya_plugin.plan.check import findings_of, setting_of, text
    from zaya_plugin.plan.setting import DOES_NOT_FIT

    findings = findings_of(setting_of(*composed(options.overrides, options.gpus)))
    print(json.dumps(findings, indent=1) if options.json else "\n".join(text(findings)))
    return USER_ERROR if any(finding["severity"] == DOES_NOT_FIT for finding in findings) else 0


def _run(options: argparse.Namespace) -> int:
    from zaya_plugin.plan.prediction import predict
    from zaya_plugin.plan.run_report import step_lines
    from zaya_plugin.plan.step_source import load, recorded_recipe
    from zaya_plugin.run.rank_plan import planned_ranks

    record = load(options.record) if options.record else None
    if options.overrides or record is None:
        recipe, world = composed(options.overrides, options.gpus)
    else:
        recipe = recorded_recipe(record)
        recipe = on_devices(recipe, options.gpus) if options.gpus else recipe
        world = planned_ranks(recipe)
    result = predict(recipe, world, record)
    if record and result.reason:
        raise ValueError(result.reason)
    print("\n".join(step_lines(result)))
    if options.output:
        options.output.write_text(json.dumps(result.record(), indent=1) + "\n")
    return 0
