# SPDX-License-Identifier: Apache-2.0
"""Start the ranks that measure a recipe's step, and the anchor's ranks after them, or collectives, or a recipe's
loader. No torch import.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from zaya_plugin.bench import step_report
from zaya_plugin.bench.options import ANCHOR, RECORD, Options, measured_recipe, with_data_path
from zaya_plugin.bench.results import write
from zaya_plugin.ground.errors import mistake

if TYPE_CHECKING:
    from zaya_plugin.config.schema import Recipe
    from zaya_plugin.run.rank_plan import Plan


def recipe_of(options: Options, output: str | None, overrides: list[str]) -> Recipe:
    """Return the recipe that is measured."""
    from zaya_plugin.handover.published import compose_published

    if options.random_tokens:
        overrides = with_data_path(overrides)
    return measured_recipe(compose_published(overrides), options, output)


def run(recipe: Recipe, options: Options) -> int:
    """Start the ranks, and the anchor's after they have ended; return the first exit code that is not 0."""
    from zaya_plugin.run.launch import launch
    from zaya_plugin.run.rank_plan import make_plan

    plan = make_plan(recipe, os.environ, ("zaya_plugin.bench.step_rank", options.to_json()))
    if options.anchor is not None:
        check_anchor(recipe.model.normalization)
        if plan.command is None:
            problem = f"its ranks start after those of the step, and {plan.started_by} starts ranks once"
            allowed = "in a command that starts its ranks itself, on one node"
            raise mistake("--anchor", options.anchor, problem=problem, allowed=allowed, fix="nproc=<devices>")
    rows = options.random_tokens or None
    return launch(recipe, verbose=True, plan=plan, vocabulary=rows, run=partial(_measure, options))


def _measure(options: Options, recipe: Recipe, plan: Plan) -> int:
    """Run the ranks of `plan`, then the anchor's."""
    from zaya_plugin.run.rank_plan import command

    run_dir = Path(recipe.run_dir)
    if plan.rank == 0:
        for left in (RECORD, ANCHOR):  # of an earlier run
            (run_dir / left).unlink(missing_ok=True)
    code = _run_ranks(recipe, plan)
    if code or options.anchor is None:
        return code
    print(f"bench: the anchor, {options.anchor}: building and compiling takes a while", flush=True)
    vocabulary = json.loads((run_dir / RECORD).read_text())["model"]["vocab_size"]
    worker = ("zaya_plugin.bench.anchor", options.to_json(), str(vocabulary))
    code = _run_ranks(recipe, replace(plan, worker=worker, command=command(recipe, plan.world_size, worker)))
    if (run_dir / ANCHOR).is_file():  # out of memory is a result too
        print(step_report.anchor_text(add_anchor(run_dir)), flush=True)
        return 0
    return code


def run_collectives(recipe: Recipe, options: dict) -> int:
    """Start the ranks of a sweep, or become the one that an outer launcher has started; return the exit code."""
    from zaya_plugin.config.compose import save_recipe
    from zaya_plugin.config.run_directory import make_writable
    from zaya_plugin.run.rank_plan import unchecked_plan

    plan = unchecked_plan(recipe, os.environ, ("zaya_plugin.bench.collectives_rank", json.dumps(options)))
    if plan.world_size < 2:
        problem = "a collective needs two ranks"
        raise mistake("nproc", plan.world_size, problem=problem, allowed="2 or more", fix="nproc=2")
    make_writable(recipe.run_dir)
    if plan.command is not None:
        save_recipe(recipe, Path(recipe.run_dir) / "recipe.yaml")
    return _run_ranks(recipe, plan)


def run_loader(recipe: Recipe, options: dict) -> int:
    """Start the ranks that read with the recipe's loader; return the exit code."""
    from zaya_plugin.run.launch import launch
    from zaya_plugin.run.rank_plan import make_plan

    plan = make_plan(recipe, os.environ, ("zaya_plugin.bench.data_rank", json.dumps(options)))
    return launch(recipe, plan=plan, run=_run_ranks)


def _run_ranks(recipe: Recipe, plan: Plan) -> int:
    from zaya_plugin.run import launch

    if plan.command is None:
        return launch.become_rank(recipe, plan)
    return launch.run_ranks(plan, Path(recipe.run_dir) / "logs").code


def check_anchor(normalization: str) -> None:
    """Raise ValueError if the installed transformers has no ZAYA, or none with these norms."""
    from zaya_plugin.compat import distribution_version
    from zaya_plugin.config.messages import check_transformers_has

    check_transformers_has(normalization)
    version = distribution_version("transformers")
    if version is None or tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < (5, 13):
        problem = f"transformers {version} has no ZAYA" if version else "transformers is not installed"
        raise mistake(
            "--anchor", "transformers", problem=problem, allowed="5.13 or later", fix="pip install 'transformers>=5.13'"
        )


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
