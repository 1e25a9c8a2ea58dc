# SPDX-License-Identifier: Apache-2.0
"""`zaya curriculum`: the stages of `curriculum.stages` one after the other, each a run of its own in <run_dir>/<stage>.

What is true lies in the stages' checkpoints, so that a kill at any moment costs the steps since the last one and nothing
else; <run_dir>/curriculum.json is the record of it that people and tools read. No torch import.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from zaya_plugin.config.compose import load_recipe
from zaya_plugin.config.schedule import step_count
from zaya_plugin.config.validate import validate
from zaya_plugin.data.ledger import report
from zaya_plugin.handover.data_places import source_uses, with_consumed
from zaya_plugin.handover.predecessor import finished_stage, losses
from zaya_plugin.run import dry_run
from zaya_plugin.run.compare_positions import compare
from zaya_plugin.run.curriculum import Curriculum, Stage
from zaya_plugin.run.launch import launch
from zaya_plugin.run.stage_tables import domain_table, table, tokens_by_source

STATE = "curriculum.json"


def run_curriculum(curriculum: Curriculum, only: str | None = None) -> int:
    """Runs what is not finished yet, in order, and returns the exit code: that of the first stage that did not finish, or 0.

    Args:
        only: name of the one stage to run, which may be run by ranks that torchrun or SLURM has started.

    Raises:
        ValueError: see `check`; a stage's own mistakes; `only` whose predecessor is not finished.
    """
    check(curriculum)
    chosen = [stage for stage in curriculum.stages if only in (None, stage.name)]
    if not chosen:
        raise ValueError(
            f"--only {only}: no such stage; allowed: {', '.join(stage.name for stage in curriculum.stages)}"
        )
    ranks_started = (
        "RANK" in os.environ or int(os.environ.get("SLURM_NTASKS", "1")) > 1 and "SLURM_STEP_ID" in os.environ
    )
    if ranks_started and only is None:
        raise ValueError(
            "zaya curriculum under torchrun or srun: a process trains one stage, so name it: --only "
            f"{'|'.join(stage.name for stage in curriculum.stages)}. `zaya slurm --curriculum` writes a script that does them all"
        )
    first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"
    for stage in chosen:
        if stage.finished:
            if first:
                print(f"zaya: stage {stage.name} is finished ({stage.done} steps)", flush=True)
            continue
        code = _run_stage(curriculum, stage, first)
        if code or not stage.finished:
            return code
    if only is None:
        tables = [table(curriculum), domain_table(curriculum), _tokens_by_source(curriculum)]
        print("\n\n".join(text for text in tables if text) + "\n", flush=True)
        if curriculum.recipe.curriculum.compare_positions:
            return _compare_positions(curriculum)
    return 0


def _run_stage(curriculum: Curriculum, stage: Stage, first: bool) -> int:
    if stage.recipe.handover.from_run is not None and not stage.done:
        finished_stage(Path(stage.recipe.handover.from_run))
    if first:
        verb = f"goes on after step {stage.done}" if stage.done else "begins"
        print(f"zaya: stage {stage.name} {verb}: {stage.steps} steps, {stage.run_dir}", flush=True)
        if stage.recipe.data.order == "continuing":
            print(report(source_uses(with_consumed(stage.recipe))), flush=True)
        write_state(curriculum, {stage.name: {"started": time.time()}})
    code = launch(stage.recipe)
    if first:
        write_state(curriculum, {stage.name: {"ended": time.time(), "exit_code": code}})
    return code


def check(curriculum: Curriculum) -> None:
    """Raises ValueError where run_dir holds another curriculum, or a stage was changed after it was handed over."""
    path = curriculum.run_dir / STATE
    names = [stage.name for stage in curriculum.stages]
    if path.is_file():
        before = [stage["name"] for stage in read_state(curriculum.run_dir)["stages"]]
        if before[: len(names)] != names and names[: len(before)] != before:
            raise ValueError(
                f"run_dir = {curriculum.run_dir}: holds a curriculum of {', '.join(before)}, and this one is {', '.join(names)}. "
                "Allowed: the same stages, more of them at the end, or another run_dir"
            )
    for stage, after in zip(curriculum.stages, curriculum.stages[1:], strict=False):
        if after.done and not stage.finished:
            saved = load_recipe(stage.run_dir / "recipe.yaml") if (stage.run_dir / "recipe.yaml").is_file() else None
            took = f"it took {step_count(saved)} steps then" if saved else "its recipe is gone"
            raise ValueError(
                f"stage {stage.name} has {stage.done} of {stage.steps} steps, but stage {after.name} has already taken over from it "
                f"({took}). Allowed: its recipe as it was, or another run_dir"
            )


def describe(curriculum: Curriculum) -> str:
    """What would run, for --dry-run: every stage's plan, and what is handed over."""
    lines = []
    for number, stage in enumerate(curriculum.stages, 1):
        state = "finished" if stage.finished else f"goes on after step {stage.done}" if stage.done else "not begun"
        lines.append(f"stage {number} of {len(curriculum.stages)}: {stage.name} ({state})")
        plan = dry_run.plan_of(stage.recipe, os.environ)
        validate(stage.recipe, plan.world_size)
        text = dry_run.describe(stage.recipe, plan, stage.overrides).splitlines()[:-1]
        if number > 1 and not curriculum.stages[number - 2].finished:
            text = [line for line in text if not line.startswith("would stop   handover.from_run")]
        taken_over = "the optimizer's state" if stage.recipe.handover.optimizer == "keep" else "a fresh optimizer"
        if number > 1 and not stage.done:
            text.insert(2, f"begins with  the weights of stage {curriculum.stages[number - 2].name} and {taken_over}")
        lines += ["  " + line for line in text]
    return "\n".join([*lines, table(curriculum), "--dry-run: nothing was created or started"])


def write_state(curriculum: Curriculum, news: dict[str, dict] | None = None) -> None:
    """Writes <run_dir>/curriculum.json whole or not at all; `news`: by stage, added to what is known of it."""
    path = curriculum.run_dir / STATE
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {stage["name"]: stage for stage in read_state(curriculum.run_dir)["stages"]} if path.is_file() else {}
    stages = [
        {
            **known.get(stage.name, {}),
            **(news or {}).get(stage.name, {}),
            "name": stage.name,
            "run_dir": str(stage.run_dir),
            "steps": stage.steps,
            "saved_step": stage.done,
            "finished": stage.finished,
            "losses": losses(stage.run_dir),
        }
        for stage in curriculum.stages
    ]
    temporary = path.with_name(f".{STATE}.{os.getpid()}")
    temporary.write_text(json.dumps({"name": curriculum.recipe.name, "stages": stages}, indent=1) + "\n")
    temporary.replace(path)


def read_state(run_dir: Path) -> dict:
    """What `write_state` wrote."""
    return json.loads((Path(run_dir) / STATE).read_text())


def _compare_positions(curriculum: Curriculum) -> int:
    short, long = curriculum.stages[-2:]
    if short.recipe.stage.seq_length >= long.recipe.stage.seq_length:
        return 0
    return compare(short.run_dir, long.run_dir)


def _tokens_by_source(curriculum: Curriculum) -> str:
    try:
        return tokens_by_source([load_recipe(stage.run_dir / "recipe.yaml") for stage in curriculum.stages])
    except ValueError as gone:  # the stages are done; data that was taken away since must not make a failure of that
        return f"tokens of each source: {gone}"
