# SPDX-License-Identifier: Apache-2.0
"""`zaya bench step`: the command line, the start of the ranks, and the anchor behind them. No torch import."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from zaya_plugin.bench import report
from zaya_plugin.bench.options import ANCHOR, ANCHORS, RECORD, VOCABULARY, Options, measured_recipe
from zaya_plugin.bench.record import write

if TYPE_CHECKING:
    from zaya_plugin.config.schema import Recipe
    from zaya_plugin.run.rank_plan import Plan

HELP = """\
zaya bench: how fast a recipe trains, and where the time goes

  zaya bench step experiment=<name> [key=value ...] [options]
  zaya bench expect STEP_JSON [experiment=<name> cluster=<name> key=value ...] [--output FILE]

Runs a few steps of the recipe through the loop of `zaya train`: warm-up, steps that are timed with nothing attached, and one traced
step, whose time it shares out: attention prologue, attention, projections, router, experts, norms, head and loss, embedding,
gradient buffers, optimizer, exposed communication and idle, each beside the matrix-product and copy rates that it measures on
the same device. Nothing is saved of the training; W&B runs offline. docs/benchmarks.md says how to read the table.

`expect` carries a step.json over to another recipe and cluster: each part at the share of its roofline that it had, collectives at the rates
of the cluster's links (the recipe's machine keys). What it prints and writes is marked as a prediction.

OPTIONS
  --steps N                   timed steps (5)
  --warmup N                  steps before them (3): compilation, allocation, self-checks
  --output DIR                where step.json, step.svg and the trace go; <run_dir>/bench when not given
  --trace, --no-trace         keep the trace (trace.json.gz, for chrome://tracing or ui.perfetto.dev), which is the default, or not
  --forward-backward-only     no optimizer: neither its memory nor its step; ZeRO's communication stays
  --random-tokens[=ROWS]      no corpus: random tokens of a vocabulary of ROWS (262272)
  --anchor transformers       then, in processes of their own, transformers' ZayaForCausalLM with FSDP2, torch.compile and fused AdamW
                              on as many devices with as many tokens, and the ratio
  --commit TEXT               what the record says of the code where there is no git checkout
  --config-dir DIR            your own recipes

EXAMPLES
  zaya bench step experiment=cpu_demo                          the demo on this machine's CPU, after:
                                                               zaya data prepare --input stdlib --output data/stdlib
  zaya bench step experiment=zaya1_base cluster=gpu --random-tokens nproc=1 model.num_layers=8 stage.global_batch_size=4 stage.micro_batch_size=4
  zaya bench step experiment=zaya1_base cluster=h200_8 --random-tokens stage.micro_batch_size=4 stage.global_batch_size=128 --anchor transformers
  zaya bench expect step.json experiment=zaya1_base cluster=mi300x_8 stage.micro_batch_size=4 stage.global_batch_size=128
  torchrun --nnodes 2 ... -m zaya_plugin.cli bench step ...    several nodes; or: srun zaya bench step ...
"""
FLAGS = {"--forward-backward-only": ("optimizer", False), "--no-trace": ("trace", False), "--trace": ("trace", True)}


def main(argv: list[str]) -> int:
    """`zaya bench`; returns its exit code, raises ValueError for what a user can mend."""
    if not argv or any(flag in argv for flag in ("-h", "--help")):
        print(HELP, end="")
        return 0 if argv else 2
    if argv[0] == "expect":
        from zaya_plugin.bench import expect

        return expect.main(argv[1:])
    if argv[0] != "step":
        raise ValueError(f"zaya bench {argv[0]}: allowed: zaya bench step, zaya bench expect; see zaya bench --help")
    options, output, overrides = parse(argv[1:])
    return run(recipe_of(options, output, overrides), options)


def parse(argv: list[str]) -> tuple[Options, str | None, list[str]]:
    """The options, --output, and what is left: overrides and --config-dir."""
    from zaya_plugin.run.commands import option

    chosen: dict = {"command": shlex.join(["zaya", "bench", "step", *argv])}
    for flag, (name, value) in FLAGS.items():
        if flag in argv:
            chosen[name] = value
            argv = [item for item in argv if item != flag]
    for name, least in (("steps", 1), ("warmup", 1)):
        argv, text = option(argv, f"--{name}")
        if text is not None:
            if not text.isdecimal() or int(text) < least:
                raise ValueError(f"--{name} {text}: allowed: a number from {least} on")
            chosen[name] = int(text)
    argv, anchor = option(argv, "--anchor")
    if anchor is not None and anchor not in ANCHORS:
        raise ValueError(f"--anchor {anchor}: allowed: {', '.join(ANCHORS)}")
    argv, output = option(argv, "--output")
    argv, chosen["commit"] = option(argv, "--commit")
    rest = []
    for item in argv:
        flag, _, rows = item.partition("=")
        if flag != "--random-tokens":
            rest.append(item)
        elif rows and not (rows.isdecimal() and int(rows) > 1):
            raise ValueError(f"{item}: allowed: --random-tokens, or --random-tokens=ROWS with two rows or more")
        else:
            chosen["random_tokens"] = int(rows) if rows else VOCABULARY
    return Options(**chosen, anchor=anchor), output, rest


def recipe_of(options: Options, output: str | None, overrides: list[str]) -> Recipe:
    """The recipe that is measured."""
    from zaya_plugin.config.compose import compose
    from zaya_plugin.run.commands import overrides_of

    if options.random_tokens and not any(item.startswith("data.path=") for item in overrides):
        overrides = [*overrides, "data.path=none"]  # a recipe without one is refused, and nobody reads it
    return measured_recipe(compose(overrides_of(overrides, "bench step")), options, output)


def run(recipe: Recipe, options: Options) -> int:
    """Starts the ranks, and the anchor's after they have ended; returns the first exit code that is not 0."""
    from zaya_plugin.config.run_directory import check_resume, keep_recipe, make_writable
    from zaya_plugin.config.validate import validate
    from zaya_plugin.run import before_start, launch, rank_plan

    plan = rank_plan.make_plan(recipe, os.environ, ("zaya_plugin.bench.worker", options.to_json()))
    validate(recipe, plan.world_size)
    if recipe.dry_run:
        from zaya_plugin.run import dry_run

        print(dry_run.describe(recipe, plan))
        return 0
    recipe = before_start.with_choices(recipe, plan)
    check_resume(recipe.run_dir, recipe.resume)
    (before_start.check_machine if options.random_tokens else before_start.check_surroundings)(recipe, plan)
    if options.anchor is not None:
        check_anchor()
    make_writable(recipe.run_dir)
    run_dir = Path(recipe.run_dir)
    if plan.rank == 0:
        keep_recipe(recipe, run_dir)
        for left in (RECORD, ANCHOR):  # of an earlier run: what is read below is of this one
            (run_dir / left).unlink(missing_ok=True)
    if plan.command is None and options.anchor is None:
        return launch.become_rank(recipe, plan)
    code = launch.run_ranks(plan, run_dir / "logs") if plan.command else own_process(recipe, plan, 0)
    if code or options.anchor is None:
        return code
    vocabulary = json.loads((run_dir / RECORD).read_text())["model"]["vocab_size"]
    if plan.rank == 0:
        print(f"bench: the anchor, {options.anchor}: building and compiling takes a while", flush=True)
    worker = ("zaya_plugin.bench.anchor", options.to_json(), str(vocabulary))
    anchor = replace(plan, worker=worker)
    if plan.command is None:
        code = own_process(recipe, anchor, 1)
    else:
        anchor = replace(anchor, command=rank_plan.command(recipe, plan.world_size, worker))
        code = launch.run_ranks(anchor, run_dir / "logs")
    if (run_dir / ANCHOR).is_file():  # out of memory is a result too
        code = 0
    if plan.rank == 0 and code == 0:
        print(report.anchor_text(add_anchor(run_dir)), flush=True)
    return code


def check_anchor() -> None:
    """Raises ValueError where transformers has no ZAYA."""
    from importlib import metadata

    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        version = None
    if version is None or tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < (5, 13):
        raise ValueError(
            f"--anchor transformers: transformers is {version or 'not installed'}; allowed: 5.13 or later, which has ZAYA"
        )


def own_process(recipe: Recipe, plan: Plan, port: int) -> int:
    """This rank of an outer launcher as a child, so that its memory is free for what comes after. port: added to the launcher's,
    whose store still holds the keys of the process before."""
    import tempfile

    from zaya_plugin.config.compose import save_recipe

    environment = {**os.environ, **plan.environment}
    environment["MASTER_PORT"] = str(int(environment["MASTER_PORT"]) + port)
    if port:
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    module, *further = plan.worker
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recipe.yaml"
        save_recipe(recipe, path)
        return subprocess.run([sys.executable, "-m", module, str(path), *further], env=environment).returncode


def add_anchor(run_dir: Path) -> dict:
    """The record with the anchor's figures and the ratio of tokens a second and device, written again."""
    found, anchor = (json.loads((run_dir / name).read_text()) for name in (RECORD, ANCHOR))
    if "error" not in anchor:
        step = found["step"]
        flops_a_token = step["tflops_per_device"] / step["tokens_per_s_per_device"]
        anchor["tflops_per_device"] = flops_a_token * anchor["tokens_per_s_per_device"]
        anchor["ratio"] = step["tokens_per_s_per_device"] / anchor["tokens_per_s_per_device"]
    found["anchor"] = anchor
    write(run_dir / RECORD, found)
    return found
