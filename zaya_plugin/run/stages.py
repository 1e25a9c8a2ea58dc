# SPDX-License-Identifier: Apache-2.0
"""Composes the stages of a curriculum from `curriculum.stages`, each with its directory and its place in the data. No
torch import.
"""

import copy
from dataclasses import dataclass, replace
from pathlib import Path

from zaya_plugin.checkpoint.convert.description import KEYS, Description
from zaya_plugin.config.compose import compose, load_recipe
from zaya_plugin.config.schedule import sample_count, step_count
from zaya_plugin.config.schema import Recipe, get
from zaya_plugin.ground.errors import as_typed, mistake
from zaya_plugin.handover.predecessor import same_order, saved_step
from zaya_plugin.handover.published import with_published

# Keys that each stage has for itself; they are set from the curriculum's.
PER_CURRICULUM = ("experiment", "run_dir", "name", "resume", "dry_run", "handover.from_run", "logger.wandb_group")


@dataclass(frozen=True)
class Stage:
    """One stage. overrides: the words after `zaya train` that run it. steps: their number in the whole stage."""

    name: str
    overrides: tuple[str, ...]
    recipe: Recipe
    steps: int

    @property
    def run_dir(self) -> Path:
        """Directory of the stage."""
        return Path(self.recipe.run_dir)

    @property
    def done(self) -> int:
        """Steps up to the newest checkpoint."""
        return saved_step(self.run_dir) or 0

    @property
    def finished(self) -> bool:
        """Whether all steps are done and saved."""
        return self.done >= self.steps


@dataclass(frozen=True)
class Curriculum:
    """All stages, and the recipe that lists them."""

    recipe: Recipe
    stages: tuple[Stage, ...]

    @property
    def run_dir(self) -> Path:
        """Directory of the curriculum; it holds one directory for each stage."""
        return Path(self.recipe.run_dir)


def compose_curriculum(overrides: list[str], download: bool = False) -> Curriculum:
    """Compose the stages from the words of `zaya curriculum`: experiment=<name>, key=value for all stages,
    <stage>:key=value for one. All stages have the model of the first one's handover.from_hf, where its files are on this
    machine, or with `download` on the Hub.

    Raises:
        ValueError: no stages are listed, a stage's name is unknown or repeated, or a recipe is invalid.
    """
    special = [item.partition(":") for item in overrides if _is_special(item)]
    common = [item for item in overrides if not _is_special(item)]
    # data.path has no default: where stages alone set it, one of them stands for what all stages share.
    paths = [item for _, _, item in special if item.startswith("data.path=")]
    lent = [] if any(item.startswith("data.path=") for item in common) else paths[:1]
    whole = compose([*common, *lent])
    if not whole.curriculum.stages:
        raise mistake(
            "curriculum.stages",
            [],
            problem=f"{', '.join(item for item in common if item.startswith('experiment=')) or 'no experiment'} lists "
            "no stages",
            allowed="a list of experiments, as in curriculum.stages=[mine_4k,mine_32k]",
            fix="experiment=zaya1_base, or experiment=cpu_demo",
        )
    shared = [item for item in common if item.lstrip("+~").partition("=")[0] not in PER_CURRICULUM]
    shared = [item for item in shared if not item.startswith("curriculum.")]
    recipes = {one: compose([f"experiment={one}", *shared, *lent]) for one in whole.curriculum.stages}
    names = {experiment: recipe.stage.name for experiment, recipe in recipes.items()}
    if len(set(names.values())) < len(whole.curriculum.stages):
        raise mistake(
            "curriculum.stages",
            whole.curriculum.stages,
            problem="two of them have the same stage.name",
            fix="curriculum.stages=[...], each experiment once",
        )
    for key, _, item in special:
        if key not in names and key not in names.values():
            raise mistake(f"{key}:{item}", problem="no such stage", allowed=", ".join(names.values()))
    stages: list[Stage] = []
    for experiment, name in names.items():
        own = [item for key, _, item in special if key in (experiment, name)]
        words = [f"experiment={experiment}", *shared, *own]
        recipe = compose(words) if own or lent else recipes[experiment]
        if (rank := recipe.optim.lora.rank) is not None:
            raise mistake(
                "optim.lora.rank",
                rank,
                problem=f"the stage {name} is to train adapters, and no stage can hand them over or start with them from "
                "the stage before",
                allowed="null in a curriculum",
                fix=f"zaya train experiment={experiment} handover.from_hf=... optim.lora.rank={rank}, a run of its own",
            )
        places = {"name": f"{whole.name}-{name}", "run_dir": str(Path(whole.run_dir) / name), "resume": "auto"}
        places["logger.wandb_group"] = whole.name
        if Path(whole.checkpoint.path).is_absolute():
            places["checkpoint.path"] = str(Path(whole.checkpoint.path) / name)
        if stages:
            places["handover.from_run"] = stages[-1].recipe.run_dir
        stage = _placed(Stage(name, tuple(words), recipe, step_count(recipe)), places)
        if not stages:
            download = download and not whole.dry_run
            stage = replace(stage, recipe=with_published(stage.recipe, words, download))
        elif (source := stages[0].recipe.handover.from_hf) is not None and recipe.handover.from_hf in (None, source):
            stage = _placed(stage, {"handover.from_hf": None} | _model_of(stages[0].recipe, recipe, own))
        stages.append(stage)
    return Curriculum(whole, tuple(_with_data_places(stages)))


def _model_of(first: Recipe, recipe: Recipe, own: list[str]) -> dict[str, object]:
    """Return the keys of `recipe` that have to change for the network of `first` and its tokenizer of the same data. Words
    of the stage's `own` stay: its start compares them with the checkpoint.
    """
    names = Description.of_recipe(recipe, 1).differing(Description.of_recipe(first, 1))
    keys = [KEYS[name] for name in names] + ["data.tokenizer"] * (first.data.path == recipe.data.path)
    typed = {item.partition("=")[0] for item in own}
    return {key: get(first, key) for key in keys if key not in typed and get(first, key) != get(recipe, key)}


def _placed(stage: Stage, values: dict[str, object]) -> Stage:
    """Return `stage` with further keys set, in its recipe and in the words that compose it."""
    recipe = copy.deepcopy(stage.recipe)
    for path, value in values.items():
        group, _, key = path.rpartition(".")
        setattr(getattr(recipe, group) if group else recipe, key, value)
    return replace(
        stage,
        recipe=recipe,
        overrides=(*stage.overrides, *(f"{path}={as_typed(value)}" for path, value in values.items())),
    )


def _with_data_places(stages: list[Stage]) -> list[Stage]:
    """Return the stages with their first sample in the order of their data; neighbours with the same data share the
    order.
    """
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
        if begun.is_file():  # the order exists; the hand-over raises if it is too short for longer stages
            planned = max(load_recipe(begun).handover.planned_samples or 0, planned)
        for stage in group:
            place = {"handover.first_sample": first, "handover.planned_samples": planned} if len(group) > 1 else {}
            placed.append(_placed(stage, place))
            first += sample_count(stage.recipe)
    return placed


def _is_special(item: str) -> bool:
    """Whether an override is for one stage: a colon before any equals sign."""
    return ":" in item.partition("=")[0]
