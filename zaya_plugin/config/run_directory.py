# SPDX-License-Identifier: Apache-2.0
"""Check that a run directory may be used and can be written, and keep the recipe in it. Imports no torch."""

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import yaml

from zaya_plugin.config.schema import CheckpointConfig, Recipe
from zaya_plugin.ground.errors import free_space, mistake
from zaya_plugin.ground.whole_file import listing

RECIPE, MANIFEST = "recipe.yaml", "manifest.json"
# The folder of a checkpoint, and that of one that is being written, with the identity of the start that writes it.
STEP = r"iter_(\d{7}|[1-9]\d{7,})"
COMPLETE = re.compile(STEP, re.ASCII)
UNFINISHED = re.compile(STEP + r"(\.\w+)?\.unfinished", re.ASCII)


def checkpoint_path(recipe: Recipe) -> Path:
    """Return the directory of a recipe's checkpoints."""
    return Path(recipe.run_dir) / recipe.checkpoint.path


def written_by(recipe: Recipe) -> dict[str, Path]:
    """Return the directories that a run of `recipe` writes, by key; checkpoint.path only where it is not in run_dir."""
    directories, checkpoints = {"run_dir": Path(recipe.run_dir)}, checkpoint_path(recipe)
    if not checkpoints.resolve().is_relative_to(directories["run_dir"].resolve()):
        directories["checkpoint.path"] = checkpoints
    return directories


def checkpoints_of(run_dir: str | os.PathLike) -> Path:
    """Return the directory of the checkpoints of the run in `run_dir`, as its recipe.yaml states it."""
    try:
        if (file := Path(run_dir) / RECIPE).exists() and not file.is_file():  # a pipe would be waited for
            raise mistake(
                str(file),
                problem="must be a regular file",
                allowed="the recipe of a run, or none",
                fix="run_dir=<another directory>",
            )
        kept = yaml.safe_load(file.read_text())
        return Path(run_dir) / kept["checkpoint"]["path"]
    except (FileNotFoundError, NotADirectoryError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return Path(run_dir) / CheckpointConfig.path  # no run, or one of an earlier version


def iterations(directory) -> list[int]:
    """Return the iterations that have a folder with files in a directory of checkpoints, ascending, complete or not.

    directory: a path, or a place of checkpoints (checkpoint/places.py), which lists itself.

    Raises:
        ValueError: the directory exists and cannot be read;
            treating it as empty would restart the run from its first step.
    """
    return sorted(int(COMPLETE.fullmatch(path.name)[1]) for path in _folders(directory, COMPLETE))


def uploads(directory) -> list[tuple[int, Any]]:
    """Return the iterations whose manifest is written, but not yet all files of it, each with its folder, ascending.

    directory: as of `iterations`.
    """
    folders = [path for path in _folders(directory, UNFINISHED) if _has_files(path, MANIFEST)]
    return sorted(((int(UNFINISHED.fullmatch(path.name)[1]), path) for path in folders), key=lambda one: one[0])


def has_checkpoint(directory) -> bool:
    """Return whether a directory has checkpoints, complete or not, or one whose upload can be finished."""
    return bool(iterations(directory) or uploads(directory))


def is_checkpoint(path) -> bool:
    """Return whether the name is that of a checkpoint's folder."""
    return COMPLETE.fullmatch(path.name) is not None


def _folders(directory, name: re.Pattern) -> list:
    try:
        names = _names(directory)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise mistake(
            str(error.filename or directory),
            problem=f"cannot be read ({error.strerror}), so the checkpoints of the run are not known",
            allowed="a directory of checkpoints, or none",
            fix="make it readable again; nothing was started or changed",
        ) from error
    return [
        directory / one
        for one, size in names.items()
        if size is None and name.fullmatch(one) and _has_files(directory / one)
    ]


def _names(folder) -> dict[str, int | None]:
    return folder.list(sizes=False) if hasattr(folder, "list") else listing(folder, sizes=False)


def _has_files(folder, name: str | None = None) -> bool:
    """Return whether a folder has files, or the one with this name."""
    try:
        names = _names(folder)
    except OSError:  # it counts, and its check reports the damage
        return name is None
    return bool(names) if name is None else name in names


def check_resume(recipe: Recipe) -> None:
    """Check that `resume` is possible with the checkpoints of the run. Creates nothing.

    Raises:
        ValueError: resume=never and there is a checkpoint, resume=must and there is none, or the run's checkpoints are
            in another directory than the recipe's.
    """
    run_dir, resume, directory = recipe.run_dir, recipe.resume, checkpoint_path(recipe)
    before = checkpoints_of(run_dir)
    if os.path.realpath(before) != os.path.realpath(directory) and has_checkpoint(before):
        raise mistake(
            "checkpoint.path",
            recipe.checkpoint.path,
            problem=f"the checkpoints of this run are in {before}",
            allowed="the directory that the run began with",
            fix=f"checkpoint.path={os.path.abspath(before)}; or move its iter_* folders to {directory}",
        )
    exists = has_checkpoint(directory)
    if resume == "never" and exists:
        saved = iterations(directory)
        raise mistake(
            "run_dir",
            run_dir,
            problem=f"contains a checkpoint of step {saved[-1]}" if saved else "contains a checkpoint in upload",
            allowed="a directory without a checkpoint with resume=never",
            fix=f"resume=auto to continue this run, run_dir=<other directory> to start another, or delete {run_dir}",
        )
    if resume == "must" and not exists:
        raise mistake(
            "resume",
            resume,
            problem=f"no checkpoint in {directory}",
            allowed="never, auto without a checkpoint",
            fix="resume=auto, or the run_dir of the run to continue",
        )


def make_writable(run_dir: str | os.PathLike, key: str = "run_dir") -> None:
    """Create `run_dir`, the value of `key`, and check by writing a file that it is writable;
    root ignores permission bits.

    All ranks may call this at the same time: the file's name is unique to the process.

    Raises:
        ValueError: it cannot be written.
    """
    run_dir = Path(run_dir)
    check_creatable(run_dir, key)
    probe = run_dir / f".probe-{os.uname().nodename}-{os.getpid()}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        probe.write_text("written and removed by zaya train\n")
        probe.unlink()
    except OSError as error:
        raise _not_writable(key, run_dir, error.strerror) from error


def check_creatable(directory: str | os.PathLike, key: str) -> None:
    """Check that `directory`, the value of `key`, is or can become a writable directory. Creates nothing, so that a dry
    run says what the run would say.

    Raises:
        ValueError: a part of the path is not a directory, may not be written, or is on a full file system.
    """
    place = Path(os.path.abspath(directory))
    while True:
        try:
            os.stat(place)
            break
        except FileNotFoundError:
            if place.is_symlink():
                raise _not_writable(key, directory, f"{place} is a link to a missing target") from None
            place = place.parent
        except OSError as error:
            raise _not_writable(key, directory, error.strerror) from None
    if not place.is_dir():
        in_the_way = errno.EEXIST if place == Path(os.path.abspath(directory)) else errno.ENOTDIR
        raise _not_writable(key, directory, f"{os.strerror(in_the_way)}: {place} is a file")
    if not os.access(place, os.W_OK | os.X_OK):
        reads_only = os.statvfs(place).f_flag & os.ST_RDONLY
        raise _not_writable(key, directory, os.strerror(errno.EROFS if reads_only else errno.EACCES))
    space = os.statvfs(place)
    if not space.f_blocks:
        raise _not_writable(key, directory, f"{place} is not a file system for files")
    if not space.f_bavail or space.f_files and not space.f_favail:
        raise _not_writable(key, directory, f"{os.strerror(errno.ENOSPC)}; {free_space(str(place))}")


def check_kinds(recipe: Recipe) -> None:
    """Raise ValueError if a folder that a run of `recipe` writes exists as a file, or a file as a folder."""
    run_dir = Path(recipe.run_dir)
    kinds = {run_dir / name: "file" for name in (RECIPE, "metrics.jsonl")}
    kinds |= {run_dir / name: "folder" for name in ("logs", "tensorboard", "wandb", "torch_profile")}
    kinds[checkpoint_path(recipe)] = "folder"
    for path, kind in kinds.items():
        if path.exists() and not (path.is_file() if kind == "file" else path.is_dir()):
            raise mistake(
                "run_dir",
                run_dir,
                problem=f"{path} must be a {kind}: the run writes it",
                allowed=f"a {kind}, or nothing there",
                fix=f"mv {path} <another place>, or run_dir=<another directory>",
            )


def _not_writable(key: str, directory: str | os.PathLike, why: str) -> ValueError:
    problem, allowed = f"cannot be written ({why})", "a writable directory"
    return mistake(key, directory, problem=problem, allowed=allowed, fix=f"{key}=<directory>")


def keep_recipe(recipe: Recipe, run_dir: str | os.PathLike) -> Path:
    """Write `run_dir`/recipe.yaml and return its path. An existing recipe.yaml that differs is kept as
    recipe.<n>.yaml.
    """
    path = Path(run_dir) / RECIPE
    new = path.with_name(f".recipe.{os.getpid()}.yaml")
    from zaya_plugin.config.compose import save_recipe  # imports Hydra, which the supervisor does without

    save_recipe(recipe, new)
    if path.exists() and path.read_text() != new.read_text():
        n = 1
        while (older := path.with_name(f"recipe.{n}.yaml")).exists():
            n += 1
        shutil.copyfile(path, older)  # not renamed, because other ranks may be reading it
    new.replace(path)
    return path
