# SPDX-License-Identifier: Apache-2.0
"""Large files that appear whole in an unfinished folder, and the notes by which a killed command continues behind them.
Imports no torch.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from zaya_plugin.checkpoint.places import at, ignore
from zaya_plugin.ground.whole_file import write_whole

NAME = "journal.json"


def bytes_in(folder: Path) -> int:
    """Return the bytes of the files in a folder of earlier work: they are kept,
    or removed before others are written.
    """
    return sum(path.stat().st_size for path in folder.glob("*") if path.is_file())


def write_large(
    path: Path, parts: Iterable[bytes | memoryview], size: int, progress: Callable[[int], None] = ignore
) -> dict[str, int | str]:
    """Write a file of `parts`, `size` bytes in all, durable before it has its name. Return its size and checksum.

    progress: called with the bytes of each part that was taken.

    Raises:
        ValueError: the parts have another size.
    """
    unnamed = path.with_name(path.name + ".part")
    written = at(unnamed).write(parts, progress, direct=True)
    if written["bytes"] != size:
        raise ValueError(f"{unnamed} has {written['bytes']} bytes, and {size} were to be written")
    unnamed.rename(path)
    return written


class FinishedFiles:
    """A folder that is being written.

    Args:
        folder: made if it is missing; files in it that are not noted for this `origin` are removed.
        origin: identifies the work; notes of other work do not count.

    Attributes:
        files: name -> the facts of the file, `bytes` among them.
    """

    def __init__(self, folder: Path, origin: str):
        self.folder, self.origin = folder, origin
        folder.mkdir(parents=True, exist_ok=True)
        self.files: dict[str, dict[str, Any]] = {}
        try:
            noted = json.loads((folder / NAME).read_text())
            if noted["origin"] == origin:
                self.files = {name: file for name, file in noted["files"].items() if self._size(name) == file["bytes"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            pass  # it does not exist, or a full disk has cut it off
        for path in folder.iterdir():
            if path.name not in (*self.files, NAME):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    def _size(self, name: str) -> int | None:
        path = self.folder / name
        return path.stat().st_size if path.is_file() else None

    def note(self, name: str, **facts: Any) -> None:
        """Note a file that is durable and has its name."""
        self.files[name] = facts
        write_whole(self.folder / NAME, json.dumps({"origin": self.origin, "files": self.files}))

    def end(self, folder: Path | None = None) -> None:
        """Remove the notes: the folder is complete. folder: its name now, if it has another one."""
        ((folder or self.folder) / NAME).unlink(missing_ok=True)
