# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's manifest: size and checksum of every file. This package does not load its own checkpoints without one.

The files are written and synced in `iter_<n>.unfinished`, then manifest.json; then the folder gets its name. So a
folder named `iter_<n>` is complete, and a kill at any moment leaves the checkpoint before. Imports no torch.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Container, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import xxhash

from zaya_plugin.checkpoint import places
from zaya_plugin.checkpoint.places import Place, at, describe, exists, ignore
from zaya_plugin.config.run_directory import MANIFEST as NAME

FORMAT = "zaya checkpoint/1"
# Ends of the names of folders that are no checkpoints: a save that has not ended, a removal that has not ended, a
# checkpoint whose content does not have its checksums, and one from which two starts failed at the same step.
UNFINISHED, REMOVED, DAMAGED, FAILED = ".unfinished", ".removed", ".damaged", ".failed"
REPLACED = ".replaced"  # the end of another folder of the name of a checkpoint that this run has saved
LEFTOVER = re.compile(rf"iter_(\d+)(\.\w+)?({re.escape(UNFINISHED)}|{re.escape(REMOVED)})", re.ASCII)
RECIPE = "recipe_values"  # the fact that holds the recipe, by key

Folder = TypeVar("Folder", Place, Path)


def write(folder: Place | Path, iteration: int, files: Mapping[str, Mapping], **facts) -> None:
    """Write the manifest of `folder`. files: name -> as `describe`; facts: about the run,
    for `zaya checkpoint show`.
    """
    content = {"format": FORMAT, "iteration": iteration, **facts, "files": dict(sorted(files.items()))}
    content["xxh3_128"] = _own_checksum(content)
    at(folder / NAME).put(json.dumps(content, indent=1) + "\n")


def commit(unfinished: Folder, final: Folder, files: Mapping[str, Mapping], **facts) -> None:
    """Write the manifest of `unfinished`, whose files are durable, and give it the name `final`."""
    write(unfinished, int(final.name.removeprefix("iter_")), files, **facts)
    give_name(unfinished, final)


def give_name(unfinished: Folder, final: Folder) -> None:
    """Give a folder with files and manifest, all durable, the name of a checkpoint, unless there is a complete one:
    the run has saved this step before. Anything else of that name is put aside.
    """
    unfinished, final = at(unfinished), at(final)
    if exists(final / NAME) and not problems(final, read(unfinished).get("run_id")):
        return unfinished.remove()
    with contextlib.suppress(OSError):
        if not final.list():
            final.remove()  # Megatron has made it
    if final.name in final.parent.list():
        put_aside(final, REPLACED)
    unfinished.commit(final)


def put_aside(path: Folder, end: str) -> Folder:
    """Give a checkpoint that is not to be loaded a name that is no checkpoint's, and return it; nothing removes it.

    end: of the name; with a number where the name exists.
    """
    names = at(path.parent).list()
    candidates = [path.name + end, *(f"{path.name}.{number}{end}" for number in range(1, 1000))]
    aside = path.parent / next(name for name in candidates if name not in names)
    at(path).commit(at(aside))
    return aside


def remove_leftovers(directory: Place | Path, newest: int | None = None, keep: Container[str] = ()) -> None:
    """Remove what saves and removals that were killed have left, up to the iteration `newest`.
    keep: names that stay.
    """
    directory = at(directory)
    for name in places.names(directory):
        step = LEFTOVER.fullmatch(name)
        if step and name not in keep and (newest is None or int(step[1]) <= newest):
            marked = directory / name.removesuffix(REMOVED)
            if not directory.renames and not exists(marked / NAME):
                marked.remove()
            (directory / name).remove()


def read(folder: Place | Path, run_id: str | None = None) -> dict:
    """Return the manifest.

    run_id: of the run that the checkpoints belong to, if it is known.

    Raises:
        ValueError: it cannot be read, is not whole, is of another format, or of another checkpoint than the folder's
            name or `run_id` say; the text is the reason.
    """
    path = folder / NAME
    try:
        content = json.loads(places.read(at(path)))
        whole = content.get("xxh3_128") == _own_checksum(content)
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from error
    if not whole:
        raise ValueError(f"{path} does not have the checksum that it states")
    if content.get("format") != FORMAT:
        raise ValueError(f"{path} has the format {content.get('format')!r}, and this version reads {FORMAT!r}")
    if not isinstance(content.get("iteration"), int) or not isinstance(content.get("files"), dict):
        raise ValueError(f"{path} states no step or no files")
    named = re.match(r"iter_(\d+)", folder.name)
    if named and int(named[1]) != content["iteration"]:
        raise ValueError(f"{path} is of step {content['iteration']}, and not of this folder's")
    if run_id is not None and content.get("run_id") not in (None, run_id):
        others = f"the other checkpoints are of the run {run_id} (last_start.json)"
        raise ValueError(f"{path} is of the run {content['run_id']}, and {others}")
    return content


def is_of(folder: Place | Path, run_id: str | None) -> bool:
    """Return whether a folder has an intact manifest of this run."""
    try:
        return bool(read(folder, run_id))
    except ValueError:
        return False


def _own_checksum(content: Mapping) -> str:
    rest = {key: value for key, value in content.items() if key != "xxh3_128"}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode())


def problems(folder: Place | Path, run_id: str | None = None) -> list[str]:
    """Return what is wrong with the manifest (see `read`) and with the files' names and sizes; reads no file but the
    manifest.
    """
    try:
        files = read(folder, run_id)["files"]
        sizes = at(folder).list()
    except ValueError as error:
        return [str(error)]
    except OSError as error:
        return [f"{folder} cannot be read ({error.strerror})"]
    texts = []
    for name, file in files.items():
        if sizes.get(name) is None:
            texts.append(f"{folder / name} is missing")
        elif sizes[name] != file["bytes"]:
            texts.append(f"{folder / name} has {sizes[name]} bytes, its manifest states {file['bytes']}")
    return texts


def damaged(
    folder: Place | Path,
    names: list[str] | None = None,
    progress: Callable[[int], None] = ignore,
    files: Mapping[str, Mapping] | None = None,
) -> list[str]:
    """Return the files of `names` (default: all) whose content does not have its checksum, as texts.

    progress: called with the bytes of each piece. files: of the manifest, where it is read already.
    """
    files, wrong = read(folder)["files"] if files is None else files, []
    for name in files if names is None else names:
        try:
            content = describe(folder / name, progress)
        except OSError as error:
            wrong.append(f"{folder / name} cannot be read ({error.strerror})")
            continue
        if content != files[name]:
            wrong.append(
                f"{folder / name} has the checksum {content['xxh3_128']}, its manifest states {files[name]['xxh3_128']}"
            )
    return wrong


def hold(folder: Place | Path) -> AbstractContextManager | None:
    """Return a lock for reading on the manifest: while it is open, the checkpoint is not removed. None without a
    manifest; in a storage without locks it holds nothing.
    """
    try:
        return at(folder / NAME).lock(shared=True)
    except OSError:
        return None


def remove(folder: Place) -> bool:
    """Remove a checkpoint and return True; one that is being read stays, for the next removal. After a kill during the
    removal, `remove_leftovers` removes the rest: the renamed folder, or in a storage without renames the folder that is
    marked by an empty file of that name and has no manifest any more.
    """
    doomed = folder.parent / (folder.name + REMOVED)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context((folder / NAME).lock())
        except BlockingIOError:
            return False
        except OSError:
            pass  # no manifest, or no permission to lock it
        if folder.renames:
            folder.commit(doomed)
        else:
            doomed.put(b"")
            folder.remove()
    doomed.remove()
    return True
