# SPDX-License-Identifier: Apache-2.0
"""Read a run directory: metrics.jsonl, recipe.yaml and the journal of Aegis. Nothing is written, no process is asked,
and neither torch nor Hydra is imported, so this works on any machine that sees the folder, also while the run writes.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from zaya_plugin.aegis.account import Account
from zaya_plugin.aegis.bookkeeping import account
from zaya_plugin.aegis.journal import NAME as JOURNAL
from zaya_plugin.aegis.journal import read
from zaya_plugin.checkpoint.run_lock import NAME as LOCK
from zaya_plugin.config.run_directory import RECIPE, iterations
from zaya_plugin.config.schema import CheckpointConfig, Recipe, get, leaves
from zaya_plugin.ground import metrics_file
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.exit_codes import ENDED_EARLY
from zaya_plugin.ground.lock import held_by_other
from zaya_plugin.ground.progress import bar

CHECKPOINT, RESTART, FAULT, SPIKE, SKIPPED = "checkpoint", "restart", "fault", "loss spike", "skipped update"
QUIET_SECONDS, QUIET_STEPS = 120.0, 20  # without a row; a run that is quiet for both does not run any more
BYTES_WITH_BAR = 1 << 26  # of metrics.jsonl, about two seconds of reading
DEPTH = 4  # folders below a place in which runs are searched: multirun/2026-11-27/18-00-00/3


@dataclass(frozen=True)
class Mark:
    """An event of a run. step: after which it happened. kind: CHECKPOINT, RESTART, FAULT, SPIKE or SKIPPED."""

    step: int
    kind: str
    text: str


@dataclass
class Metrics:
    """The rows of metrics.jsonl by key; of a step that a resumed run repeats, those of the later attempt.

    columns: key -> (steps, values), both arrays of one length, steps ascending. Values may be NaN or infinite.
    busiest: (step, [layers]) for each row with expert_load: the load of the busiest expert by an even load.
    expert_load: [layers][experts] shares of tokens, of the last such row.
    restarts: first steps of later attempts, by the rows alone. spikes, skipped: steps.
    """

    columns: dict[str, tuple[array, array]] = field(default_factory=dict)
    busiest: list[tuple[int, array]] = field(default_factory=list)
    expert_load: list[array] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    spikes: list[int] = field(default_factory=list)
    skipped: list[int] = field(default_factory=list)
    _last: int = -1
    _has_rate: bool = False

    def add(self, row: dict[str, Any]) -> None:
        """Add a row. It may be of a step that the rows before have passed: its attempt has gone back."""
        step, is_step = row["step"], "step_s" in row
        if step < self._last or is_step and step == self._last:
            self._cut(step)
        # Only the first steps of a start have no time to go, so a run that goes on after its last row is seen too.
        has_rate = row.get("eta_s") is not None
        if is_step:
            if self._last >= 0 and self._has_rate and not has_rate and self.restarts[-1:] != [step]:
                self.restarts.append(step)
            self._last, self._has_rate = step, has_rate
        if (load := row.get("expert_load")) is not None:
            with contextlib.suppress(TypeError):  # not a table of numbers
                layers = [array("d", layer) for layer in load]
                if {len(layer) > 0 for layer in layers} == {True} and len({*map(len, layers)}) == 1:
                    self.busiest.append((step, array("d", [max(layer) * len(layer) for layer in layers])))
                    self.expert_load = layers
        if row.get("loss_spike") is not None:
            self.spikes.append(step)
        if row.get("skipped"):
            self.skipped.append(step)
        for key, value in row.items():
            if type(value) in (int, float) and key != "step":
                steps, values = self.columns.setdefault(key, (array("q"), array("d")))
                if steps and steps[-1] == step:  # a validation that is repeated
                    values[-1] = value
                else:
                    steps.append(step)
                    values.append(value)

    def _cut(self, step: int) -> None:
        for key, (steps, values) in list(self.columns.items()):
            while steps and steps[-1] >= step:
                steps.pop()
                values.pop()
            if not steps:  # a column has a last value
                del self.columns[key]
        for marks in (self.restarts, self.spikes, self.skipped):
            while marks and marks[-1] >= step:
                marks.pop()
        while self.busiest and self.busiest[-1][0] >= step:
            self.busiest.pop()
        self.restarts.append(step)
        self._last, self._has_rate = step - 1, False


@dataclass
class RunData:
    """A run directory. Its parts are read when they are asked for.

    name: of its folder. recipe: of recipe.yaml, as it is written; {} without one.
    """

    place: Path
    name: str
    recipe: dict[str, Any]

    @property
    def file(self) -> Path:
        return self.place / metrics_file.NAME

    @cached_property
    def metrics(self) -> Metrics:
        """All rows of metrics.jsonl: 10 s for a million."""
        return metrics_of(self.file)

    @cached_property
    def last(self) -> dict[str, Any]:
        """The numbers in the row of the last step, from the end of the file alone; {} before the first step."""
        with contextlib.suppress(FileNotFoundError):
            row = next((row for row in metrics_file.last_rows(self.file) if "step_s" in row), {})
            return {key: value for key, value in row.items() if type(value) in (int, float)}
        return {}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The recipe's keys with dots -> values; lists are values."""
        return dict(_leaves(self.recipe))

    @cached_property
    def last_step(self) -> int | None:
        """The number of steps that the recipe asks for; None if it does not say."""
        if self.settings.get("stage.batch_size_ramp"):  # imports Hydra
            from zaya_plugin.config.compose import load_recipe
            from zaya_plugin.config.schedule import step_count

            with contextlib.suppress(ValueError):  # a recipe of another version
                return step_count(load_recipe(self.place / RECIPE))
            return None
        steps = self.settings.get("stage.train_iters")
        return steps if type(steps) is int else None

    @cached_property
    def checkpoints(self) -> list[int]:
        """The steps of the checkpoints that exist."""
        path = self.settings.get("checkpoint.path")
        with contextlib.suppress(ValueError, OSError):
            return iterations(self.place / (path if isinstance(path, str) else CheckpointConfig.path))
        return []

    @cached_property
    def journal_file(self) -> Path | None:
        """Aegis' journal, of this folder or of the curriculum above it; None without one."""
        curriculum = [self.place.parent] if (self.place.parent / "curriculum.json").is_file() else []
        files = (folder / "aegis" / JOURNAL for folder in (self.place, *curriculum))
        return next((file for file in files if file.is_file()), None)

    @cached_property
    def journal(self) -> Account | None:
        """The account of `journal_file`."""
        return None if self.journal_file is None else account(read(self.journal_file))

    @cached_property
    def state(self) -> str:
        """One of empty, running, finished, ended early, failed, crashed, stopped.

        crashed: the processes are gone, and have left the run's lock. failed: the run ended by itself, with later steps
        than its newest checkpoint. stopped: it saved before it ended, or saves nothing. A copy of the files alone has
        no lock; it runs while rows come, at least every QUIET_SECONDS or QUIET_STEPS steps.
        """
        step, journal = self.last.get("step", 0), self.journal
        if held_by_other(self.place / LOCK):
            return "running"
        if self.last_step and step >= self.last_step:
            return "finished"
        if journal is not None and journal.ended:
            return {0: "finished", ENDED_EARLY: "ended early"}.get(journal.code, "failed")
        is_copy = not (self.place / "logs").is_dir()
        seconds = self.last.get("step_s", 0.0)
        quiet = max(QUIET_SECONDS, QUIET_STEPS * seconds if math.isfinite(seconds) else 0.0)
        for file in (self.file,) if is_copy else () if journal is None else (self.journal_file,):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - file.stat().st_mtime < quiet:
                    return "running"
        if any(self.place.glob(f"{LOCK}.*")):
            return "crashed"
        if not step:
            return "empty" if is_copy else "failed"
        saves = self.settings.get("checkpoint.save_interval") is not None and not is_copy
        return "failed" if saves and step > max(self.checkpoints, default=0) else "stopped"

    @cached_property
    def marks(self) -> list[Mark]:
        """The events of the run by step: of the journal, of metrics.jsonl, and the checkpoints that still exist."""
        metrics, marks = self.metrics, []
        checkpoints, restarts = set(self.checkpoints), set(metrics.restarts)
        if self.journal is not None:
            checkpoints.update(step for _, step in self.journal.checkpoints)
            for one in self.journal.attempts:
                if one.points and one.base > 0 and (step := self._own_step(one.base)) is not None:
                    restarts.add(step + 1)
                if one.failure is not None and (step := self._own_step(one.last_step or 0)) is not None:
                    place = f" on {one.failure.node}" if one.failure.node else ""
                    action = one.failure.action or "no decision"
                    marks.append(Mark(step, FAULT, f"{one.failure.cause}{place}, {action}"))
        marks += [Mark(step, CHECKPOINT, f"checkpoint of step {step:,}") for step in checkpoints]
        marks += [Mark(step, RESTART, f"an attempt starts with step {step:,}") for step in restarts]
        marks += [Mark(step, SPIKE, f"loss spike at step {step:,}") for step in metrics.spikes]
        marks += [Mark(step, SKIPPED, f"update of step {step:,} skipped") for step in metrics.skipped]
        return sorted(marks, key=lambda mark: mark.step)

    def _own_step(self, step: float) -> int | None:
        """Return a step of the journal as one of this run: a curriculum counts on from stage to stage."""
        stage = self.journal.stage_at(step) if self.journal.stages else None
        if stage is None or not stage.name:
            return round(step)
        return round(step - stage.before) if stage.name in (self.name, self.settings.get("stage.name")) else None


def metrics_of(file: Path, advance: Callable[[int], object] = lambda size: None) -> Metrics:
    """Return the rows of a metrics.jsonl, no rows without the file. advance: see metrics_file.rows."""
    metrics = Metrics()
    with contextlib.suppress(FileNotFoundError):
        for row in metrics_file.rows(file, advance):
            metrics.add(row)
    return metrics


def read_run(place: Path) -> RunData:
    """Return the run in the folder `place`.

    Raises:
        ValueError: it does not exist, or is not a run.
    """
    if not is_run(place):
        problem = f"has neither {metrics_file.NAME} nor {RECIPE}" if place.exists() else "does not exist"
        raise mistake("RUN", place, problem=problem, allowed="the folder of a run, as run_dir=... named it")
    recipe = None
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError, yaml.YAMLError):
        recipe = yaml.load((place / RECIPE).read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return RunData(place, place.resolve().name, recipe if isinstance(recipe, dict) else {})


def read_all(runs: Sequence[RunData]) -> None:
    """Read the metrics of runs, with a bar where that takes longer than about two seconds."""
    size = sum(run.file.stat().st_size for run in runs if run.file.is_file())
    with bar("reading", size, quiet=size < BYTES_WITH_BAR) as shown:
        for run in runs:
            run.metrics = metrics_of(run.file, shown.update)


def is_run(place: Path) -> bool:
    return (place / metrics_file.NAME).is_file() or (place / RECIPE).is_file()


def run_folders(place: Path) -> list[Path]:
    """Return `place` if it is a run, else the runs below it, as those of a multirun or of the stages of a curriculum,
    in the order of their names.
    """
    return [place] if is_run(place) else sorted(_below(place, DEPTH), key=_by_number)


def _below(place: Path, depth: int) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and not entry.name.startswith("."):
                path = place / entry.name
                if is_run(path):
                    yield path
                elif depth > 1:
                    yield from _below(path, depth - 1)


def _by_number(path: Path) -> list:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in path.parts]


def differences(runs: list[RunData]) -> dict[str, list[Any]]:
    """Return the recipe keys whose values differ between runs, each with one value a run. A recipe of an older version
    lacks newer keys, which count as their defaults. Keys that differ in every pair of runs by nature, such as run_dir,
    are left out.
    """
    defaults = {path: get(Recipe(), path) for path, _ in leaves()}
    keys = dict.fromkeys(key for run in runs for key in run.settings if key not in ("run_dir", "resume"))
    rows = {key: [run.settings.get(key, defaults.get(key)) for run in runs] for key in keys}
    return {key: row for key, row in rows.items() if any(value != row[0] for value in row)}


def _leaves(tree: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{before}{key}.")
        else:
            yield f"{before}{key}", value


def unique_names(runs: list[RunData]) -> list[str]:
    """Return a name for each run: its folder's, with the folder above where that is not unique."""
    counts = Counter(run.name for run in runs)
    return [run.name if counts[run.name] == 1 else "/".join(run.place.resolve().parts[-2:]) for run in runs]
