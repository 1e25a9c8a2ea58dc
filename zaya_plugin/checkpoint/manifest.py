# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's manifest: size and checksum of every file. This package does not load its own checkpoints without one.

The files are written and synced in `iter_<n>.unfinished`, then manifest.json; then the folder gets its name. So a folder
named `iter_<n>` is complete, and a kill at any moment leaves the checkpoint before. Imports no torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import xxhash

from zaya_plugin.ground.whole_file import write_whole

NAME = "manifest.json"
FORMAT = "zaya checkpoint/1"
# Ends of the names of folders that are no checkpoints: a save that has not ended, a removal that has not ended, a
# checkpoint whose content does not have its checksums, and one from which two starts failed at the same step.
UNFINISHED, REMOVED, DAMAGED, FAILED = ".unfinished", ".removed", ".damaged", ".failed"
REPLACED = ".replaced"  # what was in the place of a checkpoint that this run has saved
LEFTOVER = re.compile(rf"iter_(\d+)(\.\w+)?({re.escape(UNFINISHED)}|{re.escape(REMOVED)})", re.ASCII)
RECIPE = "recipe_values"  # the fact that holds the recipe, by key
PIECE = 16 * 2**20  # bytes read at once


def describe(
    path: Path, progress: Callable[[int], None] = lambda count: None, piece: int = PIECE, copy: BinaryIO | None = None
) -> dict[str, int | str]:
    """Return the bytes and the xxh3_128 checksum of a file.

    progress: called with the bytes of each piece. piece: bytes read at once. copy: what is read is written to it.
    """
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "rb", buffering=0) as file:
        while content := file.read(piece):
            if copy is not None:
                write_all(copy, content)
            digest.update(content)
            size += len(content)
            progress(len(content))
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def write_all(file: BinaryIO, content: bytes) -> None:
    """Write all of `content`; an unbuffered file may take a part of it."""
    left = memoryview(content)
    while left:
        left = left[file.write(left) :]


def write_parts(
    path: Path, parts: Iterable[bytes | memoryview], progress: Callable[[int], None] = lambda count: None
) -> dict[str, int | str]:
    """Write a file, make it durable, and return its bytes and checksum as `describe` does, taken of what was written.

    progress: called with the bytes of each part.
    """
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "wb", buffering=0) as file:
        for part in parts:
            write_all(file, part)
            digest.update(part)
            size += len(part)
            progress(len(part))
        os.fsync(file.fileno())
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


def sync(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(folder: Path, iteration: int, files: Mapping[str, Mapping], **facts) -> None:
    """Write the manifest of `folder`. files: name -> as `describe`; facts: about the run, for `zaya checkpoint show`."""
    content = {"format": FORMAT, "iteration": iteration, **facts, "files": dict(sorted(files.items()))}
    content["xxh3_128"] = _own_checksum(content)
    write_whole(folder / NAME, json.dumps(content, indent=1) + "\n")


def commit(unfinished: Path, final: Path, files: Mapping[str, Mapping], **facts) -> None:
    """Write the manifest of `unfinished`, whose files are durable, and give it the name `final`."""
    write(unfinished, int(final.name.removeprefix("iter_")), files, **facts)
    give_name(unfinished, final)


def give_name(unfinished: Path, final: Path) -> None:
    """Give a folder with files and manifest, all durable, the name of a checkpoint, unless there is a complete one:
    the run has saved this step before. Anything else of that name is put aside.
    """
    sync(unfinished)
    if (final / NAME).exists() and not problems(final, read(unfinished).get("run_id")):
        shutil.rmtree(unfinished)
        return
    with contextlib.suppress(OSError):
        final.rmdir()  # Megatron has made it
    if final.exists():
        put_aside(final, REPLACED)
    unfinished.rename(final)
    sync(final.parent)


def put_aside(path: Path, end: str) -> Path:
    """Give a checkpoint that is not to be loaded a name that is no checkpoint's, and return it; nothing removes it.

    end: of the name; with a number where the name exists.
    """
    names = [path.name + end, *(f"{path.name}.{number}{end}" for number in range(1, 1000))]
    aside = next(path.with_name(name) for name in names if not path.with_name(name).exists())
    path.rename(aside)
    return aside


def remove_leftovers(directory: Path, newest: int | None = None, keep: Container[str] = ()) -> None:
    """Remove what saves and removals that were killed have left, up to the iteration `newest`. keep: names that stay."""
    for left in directory.glob("iter_*"):
        named = LEFTOVER.fullmatch(left.name)
        if named and left.name not in keep and (newest is None or int(named[1]) <= newest):
            shutil.rmtree(left, ignore_errors=True)


def read(folder: Path, run_id: str | None = None) -> dict:
    """Return the manifest.

    run_id: of the run that the checkpoints belong to, if it is known.

    Raises:
        ValueError: it cannot be read, is not whole, is of another format, or of another checkpoint than the folder's
            name or `run_id` say; the text is the reason.
    """
    path = folder / NAME
    try:
        content = json.loads(path.read_text())
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
        others = f"the checkpoints here are of the run {run_id} (last_start.json)"
        raise ValueError(f"{path} is of the run {content['run_id']}, and {others}")
    return content


def is_of(folder: Path, run_id: str | None) -> bool:
    """Return whether a folder has an intact manifest of this run."""
    try:
        return bool(read(folder, run_id))
    except ValueError:
        return False


def _own_checksum(content: Mapping) -> str:
    rest = {key: value for key, value in content.items() if key != "xxh3_128"}
    return xxhash.xxh3_128_hexdigest(json.dumps(rest, sort_keys=True).encode())


def problems(folder: Path, run_id: str | None = None) -> list[str]:
    """Return what is wrong with the manifest (see `read`) and with the files' names and sizes; reads no file but the
    manifest.
    """
    try:
        files = read(folder, run_id)["files"]
        sizes = {entry.name: entry.stat().st_size for entry in os.scandir(folder) if entry.is_file()}
    except ValueError as error:
        return [str(error)]
    except OSError as error:
        return [f"{folder} cannot be read ({error.strerror})"]
    texts = []
    for name, file in files.items():
        if name not in sizes:
            texts.append(f"{folder / name} is missing")
        elif sizes[name] != file["bytes"]:
            texts.append(f"{folder / name} has {sizes[name]} bytes, its manifest states {file['bytes']}")
    return texts


def damaged(
    folder: Path,
    names: list[str] | None = None,
    progress: Callable[[int], None] = lambda count: None,
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


def hold(folder: Path) -> BinaryIO | None:
    """Return the manifest, opened with a lock for reading: while it is open, `removing` leaves the checkpoint. None
    without a manifest; on a file system without locks it holds nothing.
    """
    try:
        file = open(folder / NAME, "rb")
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_SH)
    return file


@contextlib.contextmanager
def removing(folder: Path) -> Iterator[bool]:
    """Keep readers from a checkpoint while its folder gets another name. Yield False if one is reading it."""
    with contextlib.ExitStack() as stack:
        free = True
        with contextlib.suppress(OSError):  # no manifest, or no locks; NFS requires a file that may be written
            file = stack.enter_context(open(folder / NAME, "r+b"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                free = False
        yield free
