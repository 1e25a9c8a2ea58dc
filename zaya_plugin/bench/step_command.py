# SPDX-License-Identifier: Apache-2.0
"""`zaya bench step`: the command line, the start of the ranks, and the anchor's ranks after them. No torch import."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zaya_plugin.bench import step_report
from zaya_plugin.bench.options import ANCHOR, ANCHORS, RECORD, VOCABULARY, Options, measured_recipe, with_data_path
from zaya_plugin.bench.step_record import write
from zaya_plugin.ground.errors import mistake

if TYPE_CHECKING:
    from zaya_plugin.config.schema import Recipe
    from zaya_plugin.run.rank_plan import Plan

HELP = """\
zaya bench: how fast a recipe trains, and where the time goes (docs/benchmarks.md)

  zaya bench step    measure a few steps of a recipe, and the share of each part of the step
  zaya bench expect  predict a step on another cluster or of another recipe from a measured one

zaya bench COMMAND --help explains a command's options, with examples.
"""
STEP = """\
Measures a few steps of a recipe in the loop of `zaya train`.

After a warm-up, steps are timed without a profiler; one further step is traced. The report divides the traced step's
time among attention prologue, attention, projections, router, experts, norms, head and loss, embedding, gradient
buffers, optimizer, exposed communication and idle, each beside the matrix-product and copy rates measured on the same
device. No checkpoint is saved; W&B runs offline."""
STEP_EXAMPLES = """\
examples:
  zaya bench step experiment=cpu_demo                          the demo on this machine's CPU, after:
    {DEMO_DATA}
  zaya bench step experiment=zaya1_base cluster=gpu --random-tokens nproc=1 model.num_layers=8 \\
    stage.global_batch_size=4 stage.micro_batch_size=4
  zaya bench step experiment=zaya1_base cluster=h200_8 --random-tokens --anchor transformers \\
    stage.micro_batch_size=4 stage.global_batch_size=128
  torchrun --nnodes 2 ... -m zaya_plugin.cli bench step ...    several nodes; or: srun zaya bench step ..."""


def main(argv: list[str]) -> int:
    """Run `zaya bench` and return its exit code; raises ValueError for a user's mistake."""
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP, end="")
        return 0 if argv else 2
    if argv[0] != "step":
        from zaya_plugin.bench import expect

        return expect.main(argv[1:])
    parsed = parse(argv[1:])
    return 2 if parsed is None else run(recipe_of(*parsed), parsed[0])


def parse(argv: list[str]) -> tuple[Options, str | None, list[str]] | None:
    """Return the options, --output, and the overrides; None without words, after printing the help."""
    from zaya_plugin.config.train_help import DEMO_DATA
    from zaya_plugin.ground.option_numbers import INT32, MOST_STEPS, whole_number
    from zaya_plugin.run.recipe_commands import Parser

    parser = Parser("bench step", STEP, STEP_EXAMPLES.format(DEMO_DATA=DEMO_DATA))
    parser.add_argument("--steps", type=whole_number(1, MOST_STEPS), default=5, metavar="N", help="timed steps (5)")
    parser.add_argument(
        "--warmup",
        type=whole_number(1, MOST_STEPS),
        default=3,
        metavar="N",
        help="steps before them (3): compilation, allocation, self-checks",
    )
    parser.add_argument("--output", metavar="DIR", help="folder of step.json, step.svg and the trace (<run_dir>/bench)")
    parser.add_argument(
        "--trace",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep the trace, trace.json.gz, for ui.perfetto.dev (default), or delete it after the report",
    )
    parser.add_argument(
        "--forward-backward-only",
        dest="optimizer",
        action="store_false",
        help="no optimizer: neither its memory nor its step; ZeRO's communication stays",
    )
    parser.add_argument(
        "--random-tokens",
        type=whole_number(2, INT32),
        default=0,
        metavar="ROWS",
        help=f"random tokens in place of a corpus: --random-tokens for a vocabulary of {VOCABULARY} rows, or "
        "--random-tokens=ROWS",
    )
    parser.add_argument(
        "--anchor",
        choices=ANCHORS,
        help="then measure transformers' ZayaForCausalLM with FSDP2, torch.compile and fused AdamW on as many devices "
        "with as many "
        "tokens, in processes of its own, and print the ratio",
    )
    parser.add_argument("--commit", metavar="TEXT", help="commit for the record, where there is no git checkout")
    words = [f"{word}={VOCABULARY}" if word == "--random-tokens" else word for word in argv]
    if (options := parser.read(words)) is None:
        return None
    values = vars(options)
    output, overrides, _ = (values.pop(name) for name in ("output", "overrides", "config_dir"))
    return Options(**values, command=shlex.join(["zaya", "bench", "step", *argv])), output, overrides


def recipe_of(options: Options, output: str | None, overrides: list[str]) -> Recipe:
    """Return the recipe that is measured."""
    from zaya_plugin.config.compose import compose

    if options.random_tokens:
        overrides = with_data_path(overrides)
    return measured_recipe(compose(overrides), options, output)


def run(recipe: Recipe, options: Options) -> int:
    """Start the ranks, and the anchor's after they have ended; return the first exit code that is not 0."""
    from zaya_plugin.run.launch import launch
    from zaya_plugin.run.rank_plan import make_plan

    plan = make_plan(recipe, os.environ, ("zaya_plugin.bench.step_rank", options.to_json()))
    if options.anchor is not None:
        check_anchor(recipe.model.normalization)
    rows = options.random_tokens or None
    return launch(recipe, verbose=True, plan=plan, vocabulary=rows, run=partial(_measure, options))


def _measure(options: Options, recipe: Recipe, plan: Plan) -> int:
    """Run the ranks of `plan`, then the anchor's."""
    from zaya_plugin.run import launch, rank_plan

    run_dir = Path(recipe.run_dir)
    if plan.rank == 0:
        for left in (RECORD, ANCHOR):  # of an earlier run
            (run_dir / left).unlink(missing_ok=True)
    if plan.command is None and options.anchor is None:
        return launch.become_rank(recipe, plan)
    code = launch.run_ranks(plan, run_dir / "logs").code if plan.command else own_process(recipe, plan, 0)
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
        code = launch.run_ranks(anchor, run_dir / "logs").code
    if (run_dir / ANCHOR).is_file():  # out of memory is a result too
        code = 0
    if plan.rank == 0 and code == 0:
        print(step_report.anchor_text(add_anchor(run_dir)), flush=True)
    return code


def check_anchor(normalization: str) -> None:
    """Raise ValueError if the installed transformers has no ZAYA, or none with these norms."""
    from importlib import metadata

    from zaya_plugin.config.messages import check_transformers_has

    check_transformers_has(normalization)
    try:
        version = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        version = None
    if version is None or tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < (5, 13):
        problem = f"transformers {version} has no ZAYA" if version else "transformers is not installed"
        raise mistake(
            "--anchor", "transformers", problem=problem, allowed="5.13 or later", fix="pip install 'transformers>=5.13'"
        )


def own_process(recipe: Recipe, plan: Plan, port: int) -> int:
    """Run this rank of an outer launcher as a child process, whose memory is free afterwards, and return its exit code.

    port: added to the launcher's, whose store still holds the keys of the process before.
    """
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
    """Add the anchor's figures and the ratio of tokens per second and device to the record on disk, and return it."""
    result, anchor = (json.loads((run_dir / name).read_text()) for name in (RECORD, ANCHOR))
    if "error" not in anchor:
        step = result["step"]
        flops_a_token = step["tflops_per_device"] / step["tokens_per_s_per_device"]
        anchor["tflops_per_device"] = flops_a_token * anchor["tokens_per_s_per_device"]
        anchor["ratio"] = step["tokens_per_s_per_device"] / anchor["tokens_per_s_per_device"]
    result["anchor"] = anchor
    write(run_dir / RECORD, result)
    return result
