# SPDX-License-Identifier: Apache-2.0
"""The stages of a curriculum: composed from `curriculum.stages`, each with its directory and its place in the data. No torch import."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path

from zaya_plugin.config.compose import compose, load_recipe
from zaya_plugin.config.schedule import sample_count, step_count
from zaya_plugin.config.schema import Recipe
from zaya_plugin.handover.predecessor import same_order, saved_step

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


def _is_special(item: str) -> bool:
    """Whether an override is meant for one stage: a colon before any equals sign."""
    return ":" in item.partition("=")[0]


def _value(items: list[str], key: str) -> str | None:
    return next((item.partition("=")[2] for item in items if item.startswith(f"{key}=")), None)
