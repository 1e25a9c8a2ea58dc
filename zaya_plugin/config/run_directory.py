# SPDX-License-Identifier: Apache-2.0
"""The directory of a run: may it be used, can it be written, and the recipe that is kept in it. No torch import."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from zaya_plugin.config.compose import save_recipe
from zaya_plugin.config.schema import Recipe

# Megatron writes it last, once a checkpoint is whole
TRACKER = Path("checkpoints") / "latest_checkpointed_iteration.txt"


def check_resume(run_dir: str | os.PathLike, resume: str) -> None:
    """Raises `ValueError` where `resume` and what lies in `run_dir` do not go together. Creates nothing."""
    tracker = Path(run_dir) / TRACKER
    if resume == "never" and tracker.exists():
        raise ValueError(
            f"run_dir = {run_dir}: holds a run with a checkpoint of step {tracker.read_text().strip()}, and resume = never. "
            f"Continue it with resume=auto, start another with run_dir=<other directory>, or delete {run_dir}"
        )
    if resume == "must" and not tracker.exists():
        raise ValueError(
            f"resume = must: no checkpoint in run_dir = {run_dir} ({tracker} does not exist). "
            "Allowed here: resume=never or resume=auto, or the run_dir of the run to continue"
        )


def make_writable(run_dir: str | os.PathLike) -> None:
    """Creates `run_dir` and proves by writing that it can be written, since permission bits do not bind root.

    Every rank may call this at once: the probe's name is unique to the process.
    """
    run_dir = Path(run_dir)
    probe = run_dir / f".probe-{os.uname().nodename}-{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.write_text("written and removed by zaya train\n")
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"run_dir = {run_dir}: cannot be written ({error.strerror}). Allowed: a directory that can be; "
            "set it with run_dir=<directory>"
        ) from error


def keep_recipe(recipe: Recipe, run_dir: str | os.PathLike) -> Path:
    """Writes `run_dir`/recipe.yaml and returns its path; a different one that is there becomes recipe.<n>.yaml."""
    path = Path(run_dir) / "recipe.yaml"
    new = path.with_name(f".recipe.{os.getpid()}.yaml")
    save_recipe(recipe, new)
    if path.exists() and path.read_text() != new.read_text():
        n = 1
        while (older := path.with_name(f"recipe.{n}.yaml")).exists():
            n += 1
        shutil.copyfile(path, older)  # not renamed: other ranks may be reading it
    new.replace(path)
    return path
