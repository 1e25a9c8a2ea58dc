# SPDX-License-Identifier: Apache-2.0
"""Runs the stages of `curriculum.stages` one after the other, each as a run in <run_dir>/<stage>, and prints tables of
their results.

The state of a curriculum is that of its stages' checkpoints, so a kill at any moment loses only the steps since the
last one. <run_dir>/curriculum.json is a record for people and tools. No torch import.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from zaya_plugin.config.compose import load_recipe
from zaya_plugin.config.schedule import first_learning_rate, last_learning_rate, step_count, token_count
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.ledger import report
from zaya_plugin.ground.columns import aligned
from zaya_plugin.ground.errors import mistake, nearest_name
from zaya_plugin.ground.exit_codes import ENDED_EARLY
from zaya_plugin.ground.whole_file import write_whole
from zaya_plugin.handover.data_places import source_uses, with_consumed
from zaya_plugin.handover.predecessor import domain_losses, finished_stage, losses
from zaya_plugin.run.dry_run import MORE, describe, stops, unchecked_parts, verdict
from zaya_plugin.run.launch import last_words, launch
from zaya_plugin.run.rank_plan import Plan, check_environment, make_plan, rank_environment, task_count, whole_variable
from zaya_plugin.run.stages import Curriculum, Stage

NOTHING_CREATED = "--dry-run: nothing was created or started"
STATE = "curriculum.json"
POSITIONS = "loss_by_position.json"  # written by zaya_plugin.inference.perplexity
COLUMNS = (
    *("stage", "context", "RoPE base", "CP", "tokens", "steps"),
    *("learning rate", "loss before", "after", "at hand-over"),
)


def run_curriculum(curriculum: Curriculum, only: str | None = None) -> int:
    """Run the stages that are not finished, in order, and return 0 or the exit code of the first stage that did not
    finish.

    Args:
        only: name of the one stage to run; ranks that torchrun or SLURM has started may run it.

    Raises:
        ValueError: see `check`; a mistake in a stage's recipe; the predecessor of `only` is not finished.
    """
    check_environment(os.environ)
    check(curriculum)
    chosen = chosen_stages(curriculum, only)
    counted = task_count(os.environ)
    in_step = counted in os.environ and "SLURM_STEP_ID" in os.environ
    ranks_started = "RANK" in os.environ or in_step and whole_variable(os.environ, counted, 1) > 1
    if ranks_started and only is None:
        raise mistake(
            "zaya curriculum",
            problem="under torchrun or srun a process trains one stage",
            allowed=f"with --only, one of {', '.join(stage.name for stage in chosen)}",
            fix="--only <stage>; `zaya export slurm --curriculum` writes a script that runs all of them",
        )
    first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    plans = {}
    if only is None:  # a mistake in the last stage's recipe is named before the first one trains
        plans = {stage.name: make_plan(stage.recipe, os.environ) for stage in chosen if not stage.finished}
    for stage in chosen:
        if stage.finished:
            if first:
                print(f"zaya: stage {stage.name} is finished ({stage.done} steps)", flush=True)
            continue
        code = _run_stage(curriculum, stage, plans.get(stage.name), first)
        if code == ENDED_EARLY and first:
            print(f"zaya: the same command continues the curriculum in stage {stage.name}", file=sys.stderr, flush=True)
        if code or not stage.finished:
            return code
    if only is None:
        tables = [table(curriculum), domain_table(curriculum), _tokens_by_source(curriculum)]
        print("\n\n".join(text for text in tables if text) + "\n", flush=True)
        if curriculum.recipe.curriculum.compare_positions:
            return _compare_positions(*curriculum.stages[-2:])
    return 0


def chosen_stages(curriculum: Curriculum, only: str | None) -> list[Stage]:
    """Return all stages, or the one that --only names; raises ValueError if there is no such stage."""
    chosen = [stage for stage in curriculum.stages if only in (None, stage.name)]
    if not chosen:
        names = [stage.name for stage in curriculum.stages]
        fix = f"--only {nearest_name(only, names) or names[0]}"
        raise mistake("--only", only, problem="no such stage", allowed=", ".join(names), fix=fix)
    return chosen


def _run_stage(curriculum: Curriculum, stage: Stage, plan: Plan | None, first: bool) -> int:
    if stage.recipe.handover.from_run is not None and not stage.done:
        finished_stage(Path(stage.recipe.handover.from_run))
    if first:
        verb = f"resumes after step {stage.done}" if stage.done else "starts"
        print(f"zaya: stage {stage.name} {verb}: {stage.steps} steps, {stage.run_dir}", flush=True)
        if stage.recipe.data.order == "continuing":
            print(report(source_uses(with_consumed(stage.recipe))), flush=True)
        write_state(curriculum, {stage.name: {"started": time.time()}})
    code = launch(stage.recipe, plan=plan)
    if first:
        write_state(curriculum, {stage.name: {"ended": time.time(), "exit_code": code}})
    return code


def check(curriculum: Curriculum) -> None:
    """Raise ValueError if run_dir holds another curriculum, or a stage was changed after the next stage had started
    from it.
    """
    names = [stage.name for stage in curriculum.stages]
    if (curriculum.run_dir / STATE).is_file():
        before = [stage["name"] for stage in read_state(curriculum.run_dir)["stages"]]
        if before[: len(names)] != names and names[: len(before)] != before:
            raise mistake(
                "run_dir",
                curriculum.run_dir,
                problem=f"holds a curriculum of {', '.join(before)}, and this one is {', '.join(names)}",
                allowed="the same stages, or more of them at the end",
                fix="run_dir=<another directory>",
            )
    for stage, after in zip(curriculum.stages, curriculum.stages[1:], strict=False):
        if after.done and not stage.finished:
            saved = load_recipe(stage.run_dir / "recipe.yaml") if (stage.run_dir / "recipe.yaml").is_file() else None
            took = f"it took {step_count(saved)} steps then" if saved else "its recipe is gone"
            raise mistake(
                f"stage {stage.name}",
                problem=f"has {stage.done} of {stage.steps} steps, but stage {after.name} has already started from it "
                f"({took})",
                allowed="its recipe as it was",
                fix="run_dir=<another directory>",
            )


def dry_run(curriculum: Curriculum, only: str | None = None, verbose: bool = False) -> tuple[str, list[str]]:
    """Return what would run, with the verdict first: each stage's plan and what it starts from; and the messages with
    which the stages would stop. A stage that has not ended yet stops none after it.

    only: as in `run_curriculum`. verbose: as in `describe`.
    """
    chosen = chosen_stages(curriculum, only)
    lines, problems, unchecked = [], {}, {}
    for number, stage in enumerate(curriculum.stages, 1):
        if stage not in chosen:
            continue
        before = curriculum.stages[number - 2] if number > 1 else None
        state = "finished" if stage.finished else f"resumes after step {stage.done}" if stage.done else "not started"
        plan = make_plan(stage.recipe, os.environ, any_node=True)
        text = describe(stage.recipe, plan, stage.overrides, verbose=verbose)
        taken_over = "the optimizer's state" if stage.recipe.handover.optimizer == "keep" else "a fresh optimizer"
        if before is not None and not stage.done:
            text.insert(2, f"starts from  the weights of stage {before.name} and {taken_over}")
        lines += [
            f"stage {number} of {len(curriculum.stages)}: {stage.name} ({state})",
            *("  " + line for line in text),
        ]
        unchecked |= dict.fromkeys(unchecked_parts(stage.recipe, plan))
        waits = before is not None and not before.finished
        for problem in stops(stage.recipe, plan):
            if not (waits and problem.startswith("handover.from_run")):
                problems.setdefault(f"stage {stage.name}: {problem}")
    lines = [verdict([*problems], [*unchecked]), *lines, *unchecked, table(curriculum)]
    return "\n".join([*lines, *([] if verbose else [MORE]), NOTHING_CREATED]), [*problems]


def write_state(curriculum: Curriculum, news: dict[str, dict]) -> None:
    """Write <run_dir>/curriculum.json atomically. news: values by stage, added to those of the file."""
    path = curriculum.run_dir / STATE
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {stage["name"]: stage for stage in read_state(curriculum.run_dir)["stages"]} if path.is_file() else {}
    stages = [
        {
            **known.get(stage.name, {}),
            **news.get(stage.name, {}),
            "name": stage.name,
            "run_dir": str(stage.run_dir),
            "steps": stage.steps,
            "saved_step": stage.done,
            "finished": stage.finished,
            "losses": losses(stage.run_dir),
        }
        for stage in curriculum.stages
    ]
    write_whole(path, json.dumps({"name": curriculum.recipe.name, "stages": stages}, indent=1) + "\n")


def read_state(run_dir: Path) -> dict:
    """Return the record of `write_state`."""
    return json.loads((run_dir / STATE).read_text())


def _compare_positions(short: Stage, long: Stage) -> int:
    """Print the losses of two stages by position, compared in a process with the longer stage's environment, and return
    its exit code.

    The process writes <long run>/loss_by_position.json, and returns 1 if the longer stage's model is not better past
    the shorter context.
    """
    if short.recipe.stage.seq_length >= long.recipe.stage.seq_length:
        return 0
    recipe, result = load_recipe(long.run_dir / "recipe.yaml"), long.run_dir / POSITIONS
    result.unlink(missing_ok=True)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    environment = {**os.environ, **rank_environment(recipe, 1, os.environ), **alone}
    command = [sys.executable, "-m", "zaya_plugin.inference.perplexity", str(short.run_dir), str(long.run_dir)]
    log = long.run_dir / "logs" / "position_loss.log"
    log.parent.mkdir(exist_ok=True)
    with open(log, "w") as stderr:
        code = subprocess.run(command, env=environment, stderr=stderr).returncode
    if result.is_file():
        return code
    text = f"zaya: loss by position failed:\n{last_words(log.read_text())}\nzaya: complete log: {log}"
    print(text, file=sys.stderr)
    return code or 1


def _tokens_by_source(curriculum: Curriculum) -> str:
    try:
        return tokens_by_source([load_recipe(stage.run_dir / "recipe.yaml") for stage in curriculum.stages])
    except ValueError as gone:  # the stages are finished; data that was removed since must not fail them
        return f"tokens of each source: {gone}"


def table(curriculum: Curriculum) -> str:
    """Return a table of the stages and their results. Losses are nats a token: validation before the first step and
    after the last.
    """
    rows: list[Sequence[str]] = [COLUMNS]
    last = None
    for stage in curriculum.stages:
        recipe, seen = stage.recipe, losses(stage.run_dir)
        begins = seen["valid_first"] if recipe.stage.eval_at_start else seen["first"]
        ends = seen["valid_last"] if seen["valid_last"] is not None else seen["last"]
        ends = ends if stage.finished else None
        jump = "" if last is None or begins is None else f"{last:.3f} -> {begins:.3f}"
        rows.append(
            (
                stage.name,
                str(recipe.stage.seq_length),
                f"{recipe.stage.rotary_base:,}",
                str(recipe.parallel.context_parallel_size),
                _short(token_count(recipe)),
                f"{min(stage.done, stage.steps)}/{stage.steps}",
                f"{first_learning_rate(recipe):.1e} -> {last_learning_rate(recipe):.1e}",
                "-" if begins is None else f"{begins:.3f}",
                "-" if ends is None else f"{ends:.3f}",
                jump,
            )
        )
        last = ends
    return aligned(rows)


def domain_table(curriculum: Curriculum) -> str:
    """Return the validation loss of each domain of data.valid_blend before and after each stage; empty if no stage has
    domains.
    """
    losses = {stage.name: domain_losses(stage.run_dir) for stage in curriculum.stages}
    names = list(dict.fromkeys(name for domains in losses.values() for name in domains))
    rows = [("validation", *names)]
    for stage, domains in losses.items():
        shown = (domains.get(name) for name in names)
        rows.append((stage, *("-" if pair is None else f"{pair[0]:.3f} -> {pair[1]:.3f}" for pair in shown)))
    return aligned(rows) if names else ""


def tokens_by_source(recipes: Sequence[Recipe]) -> str:
    """Return a table of the tokens that each stage draws from each source, their sum, and the sum in epochs of the
    source.

    With GPTDataset's order a source's share of the samples equals that of its weight to within one sample.
    """
    names = [recipe.stage.name for recipe in recipes]
    drawn: dict[str, list[int]] = {}
    epoch: dict[str, int] = {}
    for number, recipe in enumerate(recipes):
        for use in source_uses(recipe):
            drawn.setdefault(use.prefix, [0] * len(recipes))[number] += use.after - use.before
            epoch[use.prefix] = use.epoch_tokens
    rows = [("tokens of", *names, "all", "epochs")]
    rows += [
        (prefix[-40:], *(f"{tokens:,}" for tokens in stages), f"{sum(stages):,}", f"{sum(stages) / epoch[prefix]:.3f}")
        for prefix, stages in drawn.items()
    ]
    return aligned(rows, right=range(1, len(rows[0])))


def _short(tokens: int) -> str:
    for limit, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if tokens >= limit:
            return f"{tokens / limit:.4g}{unit}"
    return str(tokens)
