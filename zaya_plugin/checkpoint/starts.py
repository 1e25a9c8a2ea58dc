# SPDX-License-Identifier: Apache-2.0
"""The record of a run's last start, in the directory of its checkpoints: the run, and the failures of its starts.

A start that fails at the step at which the start before it from the same checkpoint had failed may owe that to the
checkpoint (LLNL/scr#174: restarts from a bad one without end). Failures are losses and gradients that are not finite,
with the checkpoint's own recipe; all other errors, kills and signals say nothing about the checkpoint.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import xxhash

from zaya_plugin.checkpoint import places
from zaya_plugin.checkpoint.places import Place, at, exists
from zaya_plugin.config.schema import Recipe
from zaya_plugin.ground.metrics_file import last_rows

NAME = "last_start.json"
FAILED = "last_start.failed"  # exists if an error ended it


def read(directory: Place | Path) -> dict:
    """Return the record; empty where there is none."""
    try:
        content = json.loads(places.read(at(directory / NAME)))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def keep_run(directory: Place | Path, run_id: str | None) -> None:
    """Write the run to which these checkpoints belong, once there is one. An existing record stays; starts that resume
    replace it.
    """
    directory = at(directory)
    if run_id is not None and not exists(directory / NAME):
        (directory / NAME).put(json.dumps({"run_id": run_id, "path": _origin(directory)}) + "\n")


def _origin(directory: Place) -> str:
    return directory.address if directory.path is None else os.path.realpath(directory.path)


def original_of_copy(directory: Path, run_id: str, saved_in: str | None = None) -> Path | None:
    """Return the directory of which `directory` is a copy: the one that the record names, or without a record the one
    that wrote the checkpoint (`saved_in`), if it still holds the same run. None for a directory that was moved, or is
    seen at another mount point.
    """
    original = Path(read(directory).get("path", saved_in or directory))
    with contextlib.suppress(OSError):
        if read(original).get("run_id") == run_id and not original.samefile(directory):
            return original
    return None


def begin(
    directory: Place | Path,
    *,
    run_id: str,
    step: int,
    recipe: str | None,
    failed_at: int | None = None,
    passed: int | None = None,
    fork: str | None = None,
) -> None:
    """Write the record of a start.

    Args:
        step: the checkpoint that it loads, 0: none.
        recipe: checksum of the recipe; a start with a changed one is not a repetition. None: the recipe differs from
            the checkpoint's, and a failure is attributed to that.
        failed_at: the step at which the last start from the same checkpoint failed.
        passed: the newer checkpoint that was put aside because two starts from it had failed.
        fork: the end of the name of a copied run in W&B, None for an original.
    """
    directory = at(directory)
    directory.make()
    content = {"run_id": run_id, "step": step, "recipe": recipe, "failed_at": failed_at, "passed": passed}
    content |= {"fork": fork, "path": _origin(directory)}
    (directory / FAILED).remove()
    (directory / NAME).put(json.dumps(content) + "\n")


def note_failure(directory: Place | Path) -> None:
    """Note that an error ends this start. A disk that is full is no further error."""
    with contextlib.suppress(OSError):
        at(directory / FAILED).put(b"")


@dataclass(frozen=True)
class History:
    """The record of earlier starts from a checkpoint.

    Attributes:
        failed_at: the step at which the last one failed; None: it did not, or there was none.
        repeated: whether the one before it had failed there too.
        passed: the newer checkpoint that was put aside before.
    """

    failed_at: int | None = None
    repeated: bool = False
    passed: int | None = None


def history(directory: Place | Path, step: int, recipe: str | None, run_dir: Path) -> History:
    """Return the history of the checkpoint of `step`."""
    last = read(directory)
    if last.get("step") != step:
        return History()
    passed, before = last.get("passed"), last.get("failed_at")
    if recipe is None or last.get("recipe") != recipe or not exists(at(directory / FAILED)):
        return History(passed=passed)
    failed_at = max(step, last_step(run_dir / "metrics.jsonl"))
    # A step is reported one later, so that the same failure may show up one step apart.
    return History(failed_at, before is not None and abs(failed_at - before) <= 1, passed)


def checksum(recipe: Recipe) -> str:
    """Return a checksum of a recipe's values."""
    from zaya_plugin.config.compose import to_yaml  # Hydra would be half of the start of a checkpoint's writer

    return xxhash.xxh3_64_hexdigest(to_yaml(replace(recipe, resume="auto")).encode())


def last_step(metrics: Path, key: str = "step", until: float = math.inf) -> int:
    """Return the last step in metrics.jsonl whose row has `key`, up to the step `until`; 0 without one."""
    with contextlib.suppress(OSError):
        return max((row["step"] for row in last_rows(metrics) if key in row and row["step"] <= until), default=0)
    return 0
