# SPDX-License-Identifier: Apache-2.0
"""Write a file that appears whole or not at all; make files durable; list a folder that others change."""

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from zaya_plugin.ground.errors import mistake


def write_whole(path: str | os.PathLike, content) -> None:
    """Write and sync `content`, bytes or text, to a file of this process and rename it to `path`."""
    temporary = f"{os.fspath(path)}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as out:
            out.write(content.encode() if isinstance(content, str) else content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except OSError:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def sync(path: str | os.PathLike) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_ending(path: Path, option: str, endings: Iterable[str]) -> None:
    """Raise ValueError if the name of a file, the value of `option`, has none of `endings`."""
    if path.suffix not in (allowed := [*endings]):
        fix = f"{option} {path.stem}{allowed[0]}"
        raise mistake(
            option, path, problem="the name of the file has another ending", allowed=", ".join(allowed), fix=fix
        )


def check_folder(path: Path | None, option: str) -> None:
    """Raise ValueError if the folder of a file, the value of `option`, does not exist; None: no file is asked for."""
    if path is not None and not path.absolute().parent.is_dir():
        raise mistake(option, path, problem="its folder does not exist", fix=f"{option} {path.name}")


def listing(folder: str | os.PathLike, sizes: bool = True) -> dict[str, int | None]:
    """Return the names in a folder: bytes of a file (0 where `sizes` is false), None for a folder. Names that vanish
    while it is read are left out.
    """
    names: dict[str, int | None] = {}
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            names[entry.name] = None if entry.is_dir() else entry.stat().st_size if sizes else 0
    return names
