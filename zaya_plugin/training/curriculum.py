# SPDX-License-Identifier: Apache-2.0
"""`zaya curriculum`: the stages of `curriculum.stages` one after the other, each a run of its own in <run_dir>/<stage>.

What is true lies in the stages' checkpoints, so that a kill at any moment costs the steps since the last one and nothing
else; <run_dir>/curriculum.json is the record of it that people and tools read. No torch import.
"""

from __future__ import annotations

import copy
import json
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

from zaya_plugin.config.compose import compose, load_recipe
from zaya_plugin.config.schedule import sample_count, step_count
from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.ledger import report
from zaya_plugin.training.data_handover import source_uses, with_consumed
from zaya_plugin.training.handover import finished_stage, losses, same_order, saved_step
from zaya_plugin.training.stage_tables import domain_table, table, tokens_by_source

STATE = "curriculum.json"
# Each stage has its own, made from the curriculum's.
PER_CURRICULUM = ("experiment", "run_dir", "name", "resume", "dry_run", "handover.from_run", "logger.wandb_group")


@dataclass(frozen=True)
class Stage:
    """One stage. overrides: what `zaya train` takes to run it; steps: that it takes."""

    name: str
    overrides: tuple[str, ...]
    recipe: Recipe
    steps: int

    @property
    def run_dir(self) -> Path:
        """Where it runs."""
        return Path(self.recipe.run_dir)

    @property
    def done(self) -> int:
        """Steps up to its newest checkpoint."""
        return saved_step(self.run_dir) or 0

    @property
    def finished(self) -> bool:
        """Whether all steps are taken and saved."""
        return self.done >= self.steps


@dataclass(frozen=True)
class Curriculum:
    """All stages and the recipe that lists them."""

    recipe: Recipe
    stages: tuple[Stage, ...]

    @property
    def run_dir(self) -> Path:
        """Directory of the whole; holds one for each stage."""
        return Path(self.recipe.run_dir)


def compose_curriculum(overrides: list[str]) -> Curriculum:
    """The stages from `zaya curriculum`'s words: experiment=<name>, key=value for all stages, <stage>:key=value for one.

    Raises:
        ValueError: no stages are listed, a stage's name is unknown or repeated, or a recipe is not one.
    """
    special = [item.partition(":") for item in overrides if _is_special(item)]
    common = [item for item in overrides if not _is_special(item)]
    whole = compose(common)
    if not whole.curriculum.stages:
        raise ValueError(
            f"curriculum.stages = []: {_value(common, 'experiment') or 'no experiment'} lists no stages. Allowed: experiments, as "
            "in curriculum.stages=[mine_4k,mine_32k]; or experiment=zaya1_base, experiment=cpu_demo"
        )
    shared = [item for item in common if item.lstrip("+~").partition("=")[0] not in PER_CURRICULUM]
    shared = [item for item in shared if not item.startswith("curriculum.")]
    recipes = {experiment: compose([f"experiment={experiment}", *shared]) for experiment in whole.curriculum.stages}
    names = {experiment: recipe.stage.name for experiment, recipe in recipes.items()}
    if len(set(names.values())) < len(whole.curriculum.stages):
        raise ValueError(f"curriculum.stages = {whole.curriculum.stages}: two of them have the same stage.name")
    for key, _, item in special:
        if key not in names and key not in names.values():
            raise ValueError(f"{key}:{item}: no such stage; allowed: {', '.join(names.values())}")
    stages: list[Stage] = []
    for experiment, name in names.items():
        own = [item for key, _, item in special if key in (experiment, name)]
        words = [f"experiment={experiment}", *shared, *own]
        recipe = compose(words) if own else recipes[experiment]
        places = {"name": f"{whole.name}-{name}", "run_dir": str(Path(whole.run_dir) / name), "resume": "auto"}
        places["logger.wandb_group"] = whole.name
        if stages:
            places["handover.from_run"] = stages[-1].recipe.run_dir
        stages.append(_placed(Stage(name, tuple(words), recipe, step_count(recipe)), places))
    return Curriculum(whole, tuple(_with_data_places(stages)))


def _placed(stage: Stage, values: dict[str, object]) -> Stage:
    """`stage` with further keys set, in its recipe and in the words that compose it."""
    recipe = copy.deepcopy(stage.recipe)
    for path, value in values.items():
        group, _, key = path.rpartition(".")
        setattr(getattr(recipe, group) if group else recipe, key, value)
    return replace(
        stage, recipe=recipe, overrides=(*stage.overrides, *(f"{path}={value}" for path, value in values.items()))
    )


def _with_data_places(stages: list[Stage]) -> list[Stage]:
    """The stages, each told where it begins in the order of its data, which neighbours with the same data share."""
    groups: list[list[Stage]] = []
    for stage in stages:
        if groups and same_order(groups[-1][-1].recipe, stage.recipe):
            groups[-1].append(stage)
        else:
            groups.append([stage])
    placed = []
    for group in groups:
        planned, first = sum(sample_count(stage.recipe) for stage in group), 0
        begun = group[0].run_dir / "recipe.yaml"
        if begun.is_file():  # its order is made already; if it is too short for longer stages, the hand-over says so
            planned = max(load_recipe(begun).handover.planned_samples or 0, planned)
        for stage in group:
            place = {"handover.first_sample": first, "handover.planned_samples": planned} if len(group) > 1 else {}
            placed.append(_placed(stage, place))
            first += sample_count(stage.recipe)
    return placed


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
    from zaya_plugin.training.launch import launch

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
    from zaya_plugin.config.validate import validate
    from zaya_plugin.training import dry_run

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
    from zaya_plugin.training.position_loss import compare

    short, long = curriculum.stages[-2:]
    if short.recipe.stage.seq_length >= long.recipe.stage.seq_length:
        return 0
    return compare(short.run_dir, long.run_dir)


def _tokens_by_source(curriculum: Curriculum) -> str:
    try:
        return tokens_by_source([load_recipe(stage.run_dir / "recipe.yaml") for stage in curriculum.stages])
    except ValueError as gone:  # the stages are done; data that was taken away since must not make a failure of that
        return f"tokens of each source: {gone}"


def _is_special(item: str) -> bool:
    """Whether an override is meant for one stage: a colon before any equals sign."""
    return ":" in item.partition("=")[0]


def _value(items: list[str], key: str) -> str | None:
    return next((item.partition("=")[2] for item in items if item.startswith(f"{key}=")), None)
