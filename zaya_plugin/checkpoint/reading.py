# SPDX-License-Identifier: Apache-2.0
"""Open a checkpoint for reading, from outside of its run: choose it, keep the run's removal of old checkpoints from it,
and compare its files with their checksums. Every reader of a checkpoint's tensors in one process begins with `begin`;
the ranks of a start do the same together (restore.py). Imports no torch for a checkpoint with a manifest.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from zaya_plugin.checkpoint import manifest, on_disk
from zaya_plugin.config.run_directory import RECIPE, checkpoints_of, is_checkpoint, iterations
from zaya_plugin.ground.errors import mistake, nearest_name
from zaya_plugin.ground.progress import bar

TRIES = 100  # a run that removes each checkpoint before it can be opened, or a file system without stable inodes
CURRICULUM = "curriculum.json"  # written by zaya_plugin/run/curriculum_run.py


@dataclass(frozen=True)
class Reading:
    """A checkpoint that may be read. lock: holds it until this object is gone."""

    folder: Path
    lock: AbstractContextManager | None


def folder_of(path: Path, step: int | None = None, key: str = "CKPT") -> Path:
    """Return the folder of one iteration.

    Args:
        path: it, a run directory, or a directory of iterations; the value of `key`.
        step: None: the newest.

    Raises:
        ValueError: there is none.
    """
    if is_checkpoint(path) and path.is_dir():
        own = on_disk.iteration_of(path)
        if step not in (None, own):
            raise mistake("--step", step, problem=f"{path} is the checkpoint of step {own}", allowed=str(own))
        return path
    directory = kept if (kept := checkpoints_of(path)).is_dir() else path
    if not (steps := iterations(directory)):
        raise _no_checkpoint(path, key)
    if step is not None and step not in steps:
        raise mistake("--step", step, problem=f"no such checkpoint in {directory}", allowed=", ".join(map(str, steps)))
    return on_disk.folder(directory, steps[-1] if step is None else step)


def _no_checkpoint(place: Path, key: str) -> ValueError:
    allowed, fix = "a run directory with checkpoints, a directory of iter_* folders, or one of these", ""
    allowed += "; or a published model, a folder with safetensors files" if key == "MODEL" else ""
    why = "it is a file" if place.is_file() else "the path does not exist"
    if not place.exists():
        close = nearest_name(place.name, [path.name for path in place.parent.glob("*") if path.is_dir()])
        fix = str(place.parent / close) if close else ""
    if place.is_dir():
        why = "it is empty" if not any(place.iterdir()) else "no iter_* folder is in it"
        runs = [path.parent for path in place.glob(f"*/{RECIPE}") if iterations(checkpoints_of(path.parent))]
        if (place / RECIPE).is_file():
            why = f"the run has saved none in {checkpoints_of(place)}"
        elif runs:
            runs.sort(key=lambda run: checkpoints_of(run).stat().st_mtime)
            why = "it is the folder of a curriculum" if (place / CURRICULUM).is_file() else "it is a folder of runs"
            allowed, fix = ", ".join(map(str, runs)), str(runs[-1])
    return mistake(key, place, problem=f"no such checkpoint: {why}", allowed=allowed, fix=fix)


def begin(path: Path, step: int | None = None, key: str = "CKPT", compare: bool = True) -> Reading:
    """Choose a checkpoint as `folder_of` does, hold it, and compare its content with its manifest.

    compare: False leaves out the checksums, which are those of whole files, with a progress bar on stderr.

    Raises:
        ValueError: there is none, or it is not complete or damaged.
    """
    for _ in range(TRIES):
        folder = folder_of(path, step, key)
        reading = Reading(folder, manifest.hold(folder))
        has_manifest = on_disk.has_manifest(folder)
        if has_manifest if reading.lock else folder.is_dir() and not has_manifest:
            break  # else the run has removed it after the choice, and has a newer one
    directory, iteration = folder.parent, on_disk.iteration_of(folder)
    if not (broken := on_disk.problems(directory, iteration)):
        if not has_manifest:
            print(f"note: {folder} has no {manifest.NAME}, so its content was compared with nothing", file=sys.stderr)
        elif compare:
            files = manifest.read(folder)["files"]
            with bar(f"compare {folder.name}", sum(file["bytes"] for file in files.values())) as shown:
                broken = manifest.damaged(folder, progress=shown.update, files=files)
    if broken:
        older = on_disk.before(directory, iteration)
        raise mistake(
            key,
            path,
            problem=f"the checkpoint of step {iteration} is damaged: {'; '.join(broken)}",
            allowed="an intact checkpoint" + ("" if older is None else f", such as that of step {older}"),
            fix=f"zaya checkpoint list {directory}" if older is None else f"--step {older}",
        )
    return reading
