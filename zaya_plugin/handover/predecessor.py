# SPDX-License-Identifier: Apache-2.0
"""Check that the stage before is finished, and read what it hands over. No torch import."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from zaya_plugin.checkpoint import on_disk
from zaya_plugin.config.compose import load_recipe
from zaya_plugin.config.run_directory import checkpoints_of
from zaya_plugin.config.schedule import first_learning_rate, last_learning_rate, sample_count, step_count, token_count
from zaya_plugin.config.schema import NETWORK, Recipe, get, leaves
from zaya_plugin.ground import metrics_file
from zaya_plugin.ground.errors import as_typed, mistake

CONTINUOUS_TOLERANCE = 1e-6  # relative difference of learning rates that counts as none


@dataclass(frozen=True)
class Predecessor:
    """The stage before. steps: all of its steps; tokens: of it and of all stages before it."""

    run_dir: Path
    recipe: Recipe
    steps: int
    tokens: int

    @property
    def checkpoints(self) -> Path:
        """Its checkpoint directory."""
        return self.run_dir / self.recipe.checkpoint.path


def predecessor(recipe: Recipe) -> Predecessor | None:
    """Return the finished stage named by `handover.from_run`, or None where the stage starts from scratch.

    Raises:
        ValueError: there is no run, it is not finished, it is of another model or optimizer, or the first learning rate
            does not continue its last one although `handover.continuous_lr` is set.
    """
    if recipe.handover.from_run is None:
        return None
    run_dir = Path(recipe.handover.from_run)
    before = finished_stage(run_dir)
    name = before.recipe.optim.name
    if name != recipe.optim.name:
        raise mistake(
            "optim.name",
            recipe.optim.name,
            problem=f"the stage before in {run_dir} used {name}, whose state has another form",
            allowed=name,
            fix=f"optim.name={name}",
        )
    for key, field in leaves():
        if field.metadata["resume"] is NETWORK and key.startswith("model."):
            was, now = get(before.recipe, key), get(recipe, key)
            if was != now:
                problem = (
                    f"the stage before in {run_dir} trained {as_typed(was)}: its weights are those of another network"
                )
                raise mistake(key, now, problem=problem, allowed=as_typed(was), fix=f"{key}={as_typed(was)}")
    if same_order(recipe, before.recipe) and recipe.handover.first_sample:
        ended, planned = (
            before.recipe.handover.first_sample + sample_count(before.recipe),
            before.recipe.handover.planned_samples,
        )
        if (recipe.handover.first_sample, recipe.handover.planned_samples) != (ended, planned):
            raise mistake(
                "handover.first_sample",
                recipe.handover.first_sample,
                problem=f"handover.planned_samples={recipe.handover.planned_samples}; the stage before ended at sample "
                f"{ended} of an order made for {planned}, and a longer order is another one",
                allowed=f"handover.first_sample={ended} and handover.planned_samples={planned}, so that no sample is "
                "repeated or left out (in a curriculum: stages that are not lengthened once the first of them has "
                "begun)",
            )
    ends, begins = last_learning_rate(before.recipe), first_learning_rate(recipe)
    if recipe.handover.continuous_lr and not math.isclose(ends, begins, rel_tol=CONTINUOUS_TOLERANCE):
        raise mistake(
            "handover.continuous_lr",
            True,
            problem=f"the stage before ends at a learning rate of {ends:g} and this one begins at {begins:g}",
            allowed=f"true with a first learning rate of {ends:g}, or false",
            fix=f"optim.lr_warmup_init={ends:g} with a warm-up, optim.lr={ends:g} without one, or "
            "handover.continuous_lr=false",
        )
    return before


def finished_stage(run_dir: Path) -> Predecessor:
    """Return the stage in `run_dir`.

    Raises:
        ValueError: it is no run, or one that has not taken all its steps and saved after the last.
    """
    if not (run_dir / "recipe.yaml").is_file():
        raise mistake(
            "handover.from_run",
            run_dir,
            problem="holds no run (no recipe.yaml)",
            allowed="run_dir of a finished stage; handover.from_hf takes published weights",
        )
    before = load_recipe(run_dir / "recipe.yaml")
    saved, steps = saved_step(run_dir), step_count(before)
    if saved is None or saved < steps:
        done = "no checkpoint" if saved is None else f"a checkpoint of step {saved}"
        raise mistake(
            "handover.from_run",
            run_dir,
            problem=f"the stage {before.stage.name} is not finished: it has {done} and takes {steps} steps",
            fix="finish it with `zaya train`, its recipe and resume=auto, or with `zaya curriculum`, which resumes it",
        )
    return Predecessor(run_dir, before, steps, token_count(before) + tokens_before(before))


def saved_step(run_dir: Path) -> int | None:
    """Return the step of the newest complete checkpoint of a run; None without checkpoints.

    Raises:
        ValueError: it has checkpoints, and none is complete.
    """
    return on_disk.latest(checkpoints_of(run_dir))[0]


def same_order(one: Recipe, other: Recipe) -> bool:
    """Return whether two stages draw their samples from one order: of data, blend, sequence length and seed.

    Stages with data.order=continuing do not: there data.consumed says where a stage begins
    (zaya_plugin.handover.data_places).
    """
    if "continuing" in (one.data.order, other.data.order):
        return False
    fields = ("path", "blend", "packing", "reset_position_ids")
    alike = all(getattr(one.data, name) == getattr(other.data, name) for name in fields)
    return alike and one.stage.seq_length == other.stage.seq_length and one.seed == other.seed


def tokens_before(recipe: Recipe) -> int:
    """Return the tokens of all stages before `recipe`'s, along the chain of `handover.from_run`."""
    if recipe.handover.from_run is None:
        return 0
    before = load_recipe(Path(recipe.handover.from_run) / "recipe.yaml")
    return token_count(before) + tokens_before(before)


def losses(run_dir: Path) -> dict[str, float | None]:
    """Return first and last losses in <run_dir>/metrics.jsonl: `first`, `last` of training, `valid_first`,
    `valid_last`.
    """
    rows = list(metric_rows(run_dir))
    ends = dict.fromkeys(("first", "last", "valid_first", "valid_last"))
    for key, name in (("loss", ""), ("valid_loss", "valid_")):
        if values := [row[key] for row in rows if row.get(key) is not None]:
            ends[f"{name}first"], ends[f"{name}last"] = values[0], values[-1]
    return ends


def domain_losses(run_dir: Path) -> dict[str, tuple[float, float]]:
    """Return first and last validation loss of each domain in <run_dir>/metrics.jsonl."""
    ends: dict[str, tuple[float, float]] = {}
    for key, value in chain.from_iterable(row.items() for row in metric_rows(run_dir)):
        if key.startswith("validation/") and key.endswith("/loss"):
            name = key.removeprefix("validation/").removesuffix("/loss")
            ends[name] = (ends.get(name, (value,))[0], value)
    return ends


def metric_rows(run_dir: Path) -> Iterator[dict]:
    """Yield the rows of <run_dir>/metrics.jsonl, without lines that a kill has cut off; none if it cannot be read."""
    with contextlib.suppress(OSError):
        yield from metrics_file.rows(run_dir / metrics_file.NAME)
