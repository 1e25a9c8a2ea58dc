# SPDX-License-Identifier: Apache-2.0
"""From one stage to the next: is the stage before finished, and what does it hand over. No torch import."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from zaya_plugin.config.compose import load_recipe
from zaya_plugin.config.run_directory import TRACKER
from zaya_plugin.config.schedule import first_learning_rate, last_learning_rate, sample_count, step_count, token_count
from zaya_plugin.config.schema import Recipe

CONTINUOUS = 1e-6  # relative difference of learning rates that counts as none


@dataclass(frozen=True)
class Predecessor:
    """The stage that is taken over from. steps: all of its steps; tokens: of it and of all stages before it."""

    run_dir: Path
    recipe: Recipe
    steps: int
    tokens: int

    @property
    def checkpoints(self) -> Path:
        """Its checkpoint directory."""
        return self.run_dir / "checkpoints"


def predecessor(recipe: Recipe) -> Predecessor | None:
    """The finished stage named by `handover.from_run`, or None where the stage starts from scratch.

    Raises:
        ValueError: there is no run, it is not finished, or the first learning rate does not continue its last one
            although `handover.continuous_lr` is set.
    """
    if recipe.handover.from_run is None:
        return None
    run_dir = Path(recipe.handover.from_run)
    before = finished_stage(run_dir)
    if before.recipe.optim.name != recipe.optim.name:
        raise ValueError(
            f"optim.name = {recipe.optim.name}: the stage before in {run_dir} used {before.recipe.optim.name}, whose state has another "
            f"form. Allowed: {before.recipe.optim.name}"
        )
    if same_order(recipe, before.recipe) and recipe.handover.first_sample:
        ended = before.recipe.handover.first_sample + sample_count(before.recipe)
        if (recipe.handover.first_sample, recipe.handover.planned_samples) != (
            ended,
            before.recipe.handover.planned_samples,
        ):
            raise ValueError(
                f"handover.first_sample = {recipe.handover.first_sample}, handover.planned_samples = "
                f"{recipe.handover.planned_samples}: the stage before ended at sample {ended} of an order made for "
                f"{before.recipe.handover.planned_samples}, and a longer order is another one. Allowed: these two, so that no sample "
                "is repeated or left out (in a curriculum: stages that are not lengthened once the first of them has begun)"
            )
    ends, begins = last_learning_rate(before.recipe), first_learning_rate(recipe)
    if recipe.handover.continuous_lr and not math.isclose(ends, begins, rel_tol=CONTINUOUS):
        raise ValueError(
            f"handover.continuous_lr = true: the stage before ends at a learning rate of {ends:g} and this one begins at "
            f"{begins:g}. Allowed: optim.lr_warmup_init={ends:g} with a warm-up, or optim.lr={ends:g} without one; or "
            "handover.continuous_lr=false"
        )
    return before


def finished_stage(run_dir: Path) -> Predecessor:
    """What lies in `run_dir`; raises ValueError unless it is a run that took all its steps and saved after the last."""
    if not (run_dir / "recipe.yaml").is_file():
        raise ValueError(
            f"handover.from_run = {run_dir}: holds no run (there is no recipe.yaml). Allowed: a finished stage's run_dir"
        )
    before = load_recipe(run_dir / "recipe.yaml")
    saved, steps = saved_step(run_dir), step_count(before)
    if saved is None or saved < steps:
        done = "no checkpoint" if saved is None else f"a checkpoint of step {saved}"
        raise ValueError(
            f"handover.from_run = {run_dir}: the stage {before.stage.name} is not finished: it has {done} and takes {steps} steps. "
            f"Finish it first: zaya train with its recipe and resume=auto, or `zaya curriculum`, which goes on where it stopped"
        )
    return Predecessor(run_dir, before, steps, token_count(before) + tokens_before(before))


def saved_step(run_dir: Path) -> int | None:
    """Step of the newest whole checkpoint of a run, as its tracker says; None without one."""
    tracker = Path(run_dir) / TRACKER
    text = tracker.read_text().strip() if tracker.is_file() else ""
    return int(text) if text.isdigit() else None


def same_order(one: Recipe, other: Recipe) -> bool:
    """Whether two stages draw their samples from one order: the same data and blend, cut into the same length, shuffled alike.

    Of data.order=continuing none is: there data.consumed says where a stage begins (zaya_plugin.handover.data_places).
    """
    if "continuing" in (one.data.order, other.data.order):
        return False
    fields = ("path", "blend", "packing", "reset_position_ids")
    alike = all(getattr(one.data, name) == getattr(other.data, name) for name in fields)
    return alike and one.stage.seq_length == other.stage.seq_length and one.seed == other.seed


def tokens_before(recipe: Recipe) -> int:
    """Tokens of all stages before `recipe`'s, along the chain of `handover.from_run`."""
    if recipe.handover.from_run is None:
        return 0
    before = load_recipe(Path(recipe.handover.from_run) / "recipe.yaml")
    return token_count(before) + tokens_before(before)


def losses(run_dir: Path) -> dict[str, float | None]:
    """First and last losses in <run_dir>/metrics.jsonl: `first`, `last` of training steps, `valid_first`, `valid_last`."""
    found: dict[str, float | None] = dict.fromkeys(("first", "last", "valid_first", "valid_last"))
    for row in _rows(run_dir):
        for key, name in (("loss", ""), ("valid_loss", "valid_")):
            if row.get(key) is not None:
                if found[f"{name}first"] is None:
                    found[f"{name}first"] = row[key]
                found[f"{name}last"] = row[key]
    return found


def domain_losses(run_dir: Path) -> dict[str, tuple[float, float]]:
    """First and last validation loss of each domain in <run_dir>/metrics.jsonl."""
    found: dict[str, tuple[float, float]] = {}
    for row in _rows(run_dir):
        for key, value in row.items():
            if key.startswith("validation/") and key.endswith("/loss"):
                name = key[len("validation/") : -len("/loss")]
                found[name] = (found.get(name, (value,))[0], value)
    return found


def _rows(run_dir: Path) -> Iterator[dict]:
    path = Path(run_dir) / "metrics.jsonl"
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            yield json.loads(line)
        except ValueError:  # cut off by a kill
            continue
