# SPDX-License-Identifier: Apache-2.0
"""`zaya plan ...`: what a recipe needs, before an hour of a device is spent. No torch import."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import yaml

from zaya_plugin.bench.options import with_data_path
from zaya_plugin.commands import plan_report
from zaya_plugin.commands.parser import command, option
from zaya_plugin.config.compose import save_recipe
from zaya_plugin.config.schema import Recipe
from zaya_plugin.config.validate import validate
from zaya_plugin.ground import phases
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.exit_codes import USER_ERROR
from zaya_plugin.ground.option_numbers import INT32, real_number, whole_number
from zaya_plugin.ground.whole_file import check_folder
from zaya_plugin.handover.published import compose_published
from zaya_plugin.pictures.chart import Line, save_lines
from zaya_plugin.pictures.files import check_picture
from zaya_plugin.plan import search
from zaya_plugin.plan.bucket_plan import with_bucket_plan
from zaya_plugin.plan.check import DOES_NOT_FIT, findings_of, step_of, text
from zaya_plugin.plan.parallelism import faults_of, ranks_to_build
from zaya_plugin.plan.prediction import Prediction, predict
from zaya_plugin.plan.run_costs import stage_cost
from zaya_plugin.plan.sizes import faster_sizes, percentages, widths
from zaya_plugin.plan.step_source import Source, fitted, load, recorded_recipe, source_of
from zaya_plugin.run.rank_plan import planned_ranks
from zaya_plugin.run.stages import compose_curriculum

# Rows that several of the commands share.
GPUS = option("--gpus", type=whole_number(1, INT32), metavar="N", help="devices (default: those of the recipe)")
FROM = option("--from", dest="record", type=Path, metavar="STEP_JSON", help="record of `zaya bench step`")


def composed(overrides: list[str], gpus: int | None) -> tuple[Recipe, int]:
    """Return the recipe of `overrides`, on `gpus` devices if given, and the number of its ranks."""
    return on_devices(compose_published(with_data_path(overrides)), gpus)


def on_devices(recipe: Recipe, gpus: int | None) -> tuple[Recipe, int]:
    """Return the recipe with its bucket plan on `gpus` devices, whole nodes or a part of one, and the number of its
    ranks; None: the recipe's devices. Raises ValueError if the recipe is invalid on them.
    """
    node = recipe.cluster.gpus_per_node
    if gpus and gpus > node and gpus % node:
        problem = f"is not a number of whole nodes of {node}"
        raise mistake("--gpus", gpus, problem=problem, allowed=f"a multiple of {node}")
    if gpus:
        cluster = replace(recipe.cluster, num_nodes=max(1, gpus // node), gpus_per_node=min(gpus, node), numa_nodes=[])
        recipe = replace(recipe, cluster=cluster, nproc=None)
    world = planned_ranks(recipe)
    recipe, _ = with_bucket_plan(recipe, world)
    validate(recipe, world)
    return recipe, world


@command("plan check", GPUS, option("--json", action="store_true", help="print the findings as JSON"), recipe=True)
def check(options: argparse.Namespace) -> int:
    """Checks a recipe by rules: sizes, memory, matrix products, collectives, layout, hazards of many ranks,
    checkpoints.

    Each finding says what it is, why and by which source, which overrides to type, and their predicted effect. Needs no
    data and no device. docs/plan.md has the table of rules.

    examples:
      zaya plan check experiment=zaya1_base cluster=mi300x_128x8
      zaya plan check experiment=zaya1_base cluster=mi300x_8 model.moe_ffn_hidden_size=4000 --json

    Exit codes: 0, with findings or without; 2, the step does not fit into the memory, or a mistake in the recipe.
    """
    findings = findings_of(step_of(*composed(options.overrides, options.gpus)))
    print(json.dumps(findings, indent=1) if options.json else "\n".join(text(findings)))
    return USER_ERROR if any(finding["severity"] == DOES_NOT_FIT for finding in findings) else 0


@command(
    "plan run",
    GPUS,
    FROM,
    option(
        "--price",
        type=real_number(0.0, 1e6),
        metavar="X",
        help="of a device hour, in any currency: adds what stages cost",
    ),
    option(
        "--layout",
        action="store_true",
        help="also build the groups, model and shards of the first, a middle and the last rank with fake process "
        "groups, and check that shards are complete and balanced (20 s; requires torch and Megatron-core)",
    ),
    option("--output", type=Path, metavar="FILE", help="also write everything as JSON"),
    recipe=True,
)
def run(options: argparse.Namespace) -> int:
    """Predicts a run: parameters, operations, memory by component, time of a step by part, communication; and of the
    stage, or of all stages of a curriculum: tokens, days, GPU hours, cost, checkpoints, storage, failures.

    Without --from the prediction starts from speeds that were fitted to committed records of H200s; with it from the
    step.json of `zaya bench step`, and without recipe keys the step is that of the recorded recipe. Each part keeps the
    share of its roofline; collectives take the rates of the cluster's links (recipe keys machine.*). docs/plan.md
    compares predictions with measured steps.

    examples:
      zaya plan run experiment=zaya1_base cluster=h200_8 --price 2.5
      zaya plan run experiment=zaya1_base cluster=mi300x_128x8 --layout
      zaya plan run --from step.json experiment=zaya1_base cluster=mi300x_8
      zaya plan run experiment=zaya1_base cluster=mi300x_128x8 --gpus 512 --output plan.json

    Exit codes: 0; 1, a shard of --layout is incomplete or unbalanced; 2, a step does not fit, or a mistake in the
    recipe.
    """
    check_folder(options.output, "--output")
    if options.overrides or not options.record:
        recipe, world = composed(options.overrides, options.gpus)
    else:
        recipe, world = on_devices(recorded_recipe(load(options.record)), options.gpus)
    source = source_from(options.record, recipe)
    step = predict(recipe, world, source)
    if options.record and step.reason:
        raise ValueError(step.reason)
    stages = [step]
    if recipe.curriculum.stages:
        stages = [
            predict(*on_devices(stage.recipe, options.gpus), source)
            for stage in compose_curriculum(with_data_path(options.overrides)).stages
        ]
    written = {**step.record(), "stages": [stage_cost(stage, options.price) for stage in stages]}
    unfit = [
        f"verdict      {stage.recipe.name} does not start: {findings_of(stage)[0]['what']}"
        for stage in stages
        if stage.memory_share > 1
    ]
    print(*unfit, *plan_report.step_lines(step), *plan_report.stage_lines(written["stages"]), sep="\n", flush=True)
    faults = []
    if options.layout:
        ranks = written["layout"] = built_ranks(step)
        faults = faults_of(ranks, step.shape, step.layout)
        print(*plan_report.layout_lines(ranks, faults, world, step.parameters), sep="\n")
    if options.output:
        options.output.write_text(json.dumps(written, indent=1) + "\n")
    return USER_ERROR if unfit else int(bool(faults))


def source_from(record: Path | None, recipe: Recipe) -> Source:
    """Return the speeds of a record of `zaya bench step` for a prediction of `recipe`; None: the package's fit."""
    return source_of(load(record), links=bool(recipe.machine.name)) if record else fitted()


@command(
    "plan fit",
    GPUS,
    option("--goal", choices=("time", "memory"), default="time", help="the fastest step, or the least memory (time)"),
    FROM,
    option(
        "--output",
        type=Path,
        metavar="FILE.yaml",
        help="also write the setting, as an experiment for a folder of recipes",
    ),
    recipe=True,
)
def fit(options: argparse.Namespace) -> None:
    """Searches the micro-batch, recomputation, layout, buckets and optimizer instances of a recipe for a number of
    devices.

    Prints the best setting with those that lose and why, and the words to add to `zaya train`. Every figure is a
    prediction (docs/plan.md); pipeline parallelism is not searched. Settings that differ by less than runs of one
    command do count as equal, and the one with less memory is taken.

    examples:
      zaya plan fit experiment=zaya1_base cluster=h200_8 stage.global_batch_size=128
      zaya plan fit experiment=zaya1_base cluster=mi300x_128x8 --gpus 512 --output my_recipes/experiment/fitted.yaml
      zaya plan fit experiment=zaya1_base cluster=h100_8 --goal memory
    """
    check_folder(options.output, "--output")
    recipe, world = composed(options.overrides, options.gpus)
    settings = search.search(recipe, world, source_from(options.record, recipe), options.goal)
    values = search.values_of(settings[0])
    words = shlex.join(search.words_of(values))
    print(*plan_report.setting_lines(settings, options.goal), "to add:", f"  {words}", sep="\n")
    if options.output:
        named = [word[11:] for word in options.overrides if word.startswith("experiment=")]
        groups: dict = {"defaults": [*named, "_self_"]}
        for key, value in values.items():
            group, _, name = key.partition(".")
            groups.setdefault(group, {})[name] = value
        options.output.write_text("# @package _global_\n" + yaml.safe_dump(groups, sort_keys=False))


@command(
    "plan sizes",
    GPUS,
    option("--picture", type=Path, metavar="FILE.png", help="draw the widths of experts (requires matplotlib)"),
    recipe=True,
)
def sizes(options: argparse.Namespace) -> None:
    """Names sizes of a model near the recipe's that make its matrix products faster, and compares widths of experts.

    Hidden size, experts' width, heads and vocabulary are varied one at a time; the rate is that of all matrix products
    of a step, by tiles. Widths of experts are compared at the same number of parameters by the rate of training and the
    latency of decoding together. Every figure is a prediction (docs/plan.md).

    examples:
      zaya plan sizes experiment=zaya1_base cluster=mi300x_8
      zaya plan sizes experiment=zaya1_base cluster=h200_8 model.hidden_size=1900 --picture widths.png
    """
    if options.picture:
        check_picture(options.picture, "--picture", [".png"])
    recipe, world = composed(options.overrides, options.gpus)
    rows, width = widths(recipe, world), recipe.model.moe_ffn_hidden_size
    print(*plan_report.size_lines(faster_sizes(recipe, world), rows, predict(recipe, world)), sep="\n")
    if options.picture:
        lines = [Line(name, [row["width"] for row in rows], y) for name, y in percentages(rows, width).items()]
        title = f"Widths of experts at equal parameters on {recipe.machine.name} (PREDICTION)"
        save_lines(options.picture, title, lines, "width of an expert", f"% of {width:,}")


def built_ranks(step: Prediction) -> list[dict]:
    """Return what ranks of the run build, each as zaya_plugin.hosts.rank_layout describes it, in a process of its
    own."""
    ranks = ranks_to_build(step.layout, step.world)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "recipe.yaml"
        save_recipe(step.recipe, file)
        phases.begin(f"building the model's layout on {len(ranks)} of {step.world} ranks")
        words = [sys.executable, "-m", "zaya_plugin.hosts.rank_layout", str(file), str(step.world)]
        done = subprocess.run([*words, *map(str, ranks)], capture_output=True, text=True)
        phases.end()
    if done.returncode:
        problem = f"the layout could not be built: {(done.stderr.strip().splitlines() or ['no message'])[-1]}"
        raise mistake("--layout", problem=problem, fix="zaya train ... --dry-run, which checks the recipe")
    return [json.loads(line) for line in done.stdout.splitlines()]
