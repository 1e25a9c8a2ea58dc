# SPDX-License-Identifier: Apache-2.0
"""The journal of a supervised run: one line of JSON for each fact and each decision (`protocol.ROWS`), only ever
appended.

The decider alone writes it, and starts again from it after a crash. `zaya aegis status` and `report` read nothing else.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zaya_plugin.aegis.diagnose.evidence import parsed, print_line
from zaya_plugin.aegis.protocol import ROWS, Row, row_of, to_json
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.secrets import REMOVED, is_secret, without_secrets

NAME = "journal.jsonl"
CLEANED = ("command", "text", "reason", "evidence", "delivered")  # fields that people and programs have written


class Journal:
    """Appends to a file; each line is on disk before `write` returns, or waits in memory while the disk is full."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self.waiting = bytearray()  # lines that are not in the file yet
        self._failed = False
        size = os.fstat(self.file).st_size
        if size and os.pread(self.file, 1, size - 1) != b"\n":  # the writer was killed within a line
            self.waiting += b"\n"

    def write(self, row: Row, generation: int) -> None:
        """Append a row."""
        row.time, row.generation = time.time(), generation
        self.waiting += json.dumps(without_secrets_in(to_json(row))).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        """Write the lines that wait. A disk that is full or fails ends no run: it is reported,
        and tried again later.
        """
        try:
            while self.waiting:  # of a line that the disk has no room for, a part may be written
                del self.waiting[: os.write(self.file, self.waiting)]
                if not self.waiting:
                    os.fsync(self.file)
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._failed = True
                print_line(
                    f"the journal cannot be written ({error.strerror}); decisions are still made, its lines wait"
                )

    def close(self) -> None:
        self.flush()
        os.close(self.file)


def without_secrets_in(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values of a line without passwords, tokens and values of secret names."""
    return {name: _clean(value) if name in CLEANED else value for name, value in values.items()}


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return without_secrets(value)
    if isinstance(value, dict):
        hidden = {name for name, item in value.items() if isinstance(item, str) and is_secret(str(name))}
        return {name: REMOVED if name in hidden else _clean(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):  # the words of a command: a value may follow its flag
        flags = [isinstance(item, str) and item.startswith("-") and is_secret(item) for item in value]
        return [REMOVED if flag else _clean(item) for flag, item in zip([False, *flags], value, strict=False)]
    return value


def read(path: Path, progress: Callable[[int], object] = lambda count: None) -> Iterator[Row]:
    """Yield the rows of a journal; a line that was cut off by a kill is left out. progress: is called with the length of
    each line.
    """
    with open(path, errors="replace") as file:
        for line in file:
            progress(len(line))
            try:
                values = parsed(line)
            except ValueError:
                continue
            if isinstance(values, dict) and str(values.get("kind")) in ROWS:
                yield row_of(values)


def find(place: Path) -> Path:
    """Return the journal of a run: `place` is its run directory, the folder `aegis` in it, or the journal itself."""
    for path in (place, place / NAME, place / "aegis" / NAME):
        if path.is_file():
            if path.open("rb").read(1) and next(read(path), None) is None:
                raise mistake("RUN_DIR", path, problem="not a journal of zaya aegis: none of its lines is a known fact")
            return path
    problem = "has no journal of zaya aegis" if place.exists() else "does not exist"
    allowed = f"a run directory with aegis/{NAME}, the folder that holds it, or the file"
    raise mistake("RUN_DIR", place, problem=problem, allowed=allowed)
