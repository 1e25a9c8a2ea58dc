# SPDX-License-Identifier: Apache-2.0
"""Check that a run directory may be used and can be written, and keep the recipe in it. Imports no torch."""

import os
import re
import shutil
from pathlib import Path

from zaya_plugin.config.compose import save_recipe
from zaya_plugin.config.schema import Recipe
from zaya_plugin.errors import mistake

CHECKPOINTS = "checkpoints"


def iterations(directory: str | os.PathLike) -> list[int]:
    """Return the iterations that have a folder with files in a directory of checkpoints, ascending, complete or not."""
    found = (path for path in Path(directory).glob("iter_*") if is_checkpoint(path) and path.is_dir())
    return sorted(int(path.name.removeprefix("iter_")) for path in found if any(path.iterdir()))


def is_checkpoint(path: Path) -> bool:
    """Return whether the name is that of a checkpoint's folder."""
    return re.fullmatch(r"iter_\d{7}", path.name) is not None


def check_resume(run_dir: str | os.PathLike, resume: str) -> None:
    """Check that `resume` is possible with the checkpoints in `run_dir`. Creates nothing.

    Raises:
        ValueError: resume=never and there is a checkpoint, or resume=must and there is none.
    """
    saved = iterations(Path(run_dir) / CHECKPOINTS)
    if resume == "never" and saved:
        raise mistake(
            "run_dir",
            run_dir,
            problem=f"contains a checkpoint of step {saved[-1]}",
            allowed="a directory without a checkpoint with resume=never",
            fix=f"resume=auto to continue this run, run_dir=<other directory> to start another, or delete {run_dir}",
        )
    if resume == "must" and not saved:
        raise mistake(
            "resume",
            resume,
            problem=f"no checkpoint in run_dir={run_dir}",
            allowed="never, auto without a checkpoint",
            fix="resume=auto, or the run_dir of the run to continue",
        )


def make_writable(run_dir: str | os.PathLike) -> None:
    """Create `run_dir` and check by writing a file that it is writable; root ignores permission bits.

    All ranks may call this at the same time: the file's name is unique to the process.

    Raises:
        ValueError: it cannot be written.
    """
    run_dir = Path(run_dir)
    probe = run_dir / f".probe-{os.uname().nodename}-{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.write_text("written and removed by zaya train\n")
        probe.unlink()
    except OSError as error:
        problem, allowed = f"cannot be written ({error.strerror})", "a writable directory"
        raise mistake("run_dir", run_dir, problem=problem, allowed=allowed, fix="run_dir=<directory>") from error


def keep_recipe(recipe: Recipe, run_dir: str | os.PathLike) -> Path:
    """Write `run_dir`/recipe.yaml and return its path. An existing recipe.yaml that differs is kept as
    recipe.<n>.yaml.
    """
    path = Path(run_dir) / "recipe.yaml"
    new = path.with_name(f".recipe.{os.getpid()}.yaml")
    save_recipe(recipe, new)
    if path.exists() and path.read_text() != new.read_text():
        n = 1
        while (older := path.with_name(f"recipe.{n}.yaml")).exists():
            n += 1
        shutil.copyfile(path, older)  # not renamed, because other ranks may be reading it
    new.replace(path)
    return path
