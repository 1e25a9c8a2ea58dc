# SPDX-License-Identifier: Apache-2.0
"""Write a file that appears whole or not at all; list a folder that others change."""

import contextlib
import os


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


def listing(folder: str | os.PathLike, sizes: bool = True) -> dict[str, int | None]:
    """Return the names in a folder: bytes of a file (0 where `sizes` is false), None for a folder. Names that vanish
    while it is read are left out.
    """
    names: dict[str, int | None] = {}
    for entry in os.scandir(folder):
        with contextlib.suppress(FileNotFoundError):
            names[entry.name] = None if entry.is_dir() else entry.stat().st_size if sizes else 0
    return names
