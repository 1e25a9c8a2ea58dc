# SPDX-License-Identifier: Apache-2.0
"""The journal of a supervised run: one line of JSON for each fact and each decision, only ever appended.

The decision maker alone writes it. It starts again from it after a crash, and `zaya aegis status` and `report` read
nothing else.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zaya_plugin.aegis.evidence import parsed, say
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.secrets import REMOVED, is_secret, without_secrets

NAME = "journal.jsonl"
# kind -> fields beside time, kind and generation (the number of the attempt, 0 before the first)
KINDS = {
    "begin": ("command", "nodes", "spares", "ranks_per_node", "version"),  # nodes: the number of nodes asked for
    "decider": ("pid", "reason"),  # the decision maker has started (again)
    "node": ("node", "state", "reason"),  # joined, lost, out, back
    "attempt": ("nodes", "world_size", "resume_step"),  # nodes: names in the order of their ranks
    # stage: its name, where a command has several; after: the step that the ranks of an attempt, or stage, continue from
    "first_step": ("step", "stage", "after"),
    # about once a minute, and at the end of an attempt; at: when the step was seen, if that was before this line
    "progress": ("step", "step_seconds", "at", "stage", "after"),
    "checkpoint": ("step",),  # a manifest has appeared
    "symptom": ("evidence",),  # what made the decision maker look: detected now, happened at evidence["time"]
    "diagnosis": (
        "cause",
        "node",
        "rank",
        "role",
        "severity",
        "confidence",
        "first",
        "evidence",
        "cascades",
        "fingerprint",
    ),
    # start: of the SLURM job that is given back, with `requeue` alone
    "decision": ("action", "nodes_out", "delay", "to_step", "skip", "reason", "start"),
    "stopped": ("seconds", "survivors"),  # the ranks of the attempt have ended
    "alert": ("text", "delivered"),
    "end": ("code", "reason"),
}

NUMBERS = ("time", "at", "step", "after", "step_seconds", "generation", "world_size", "resume_step", "rank", "code")
TEXTS = ("node", "state", "reason", "action", "cause", "text", "stage")
LARGEST = 1e15  # of a number


class Journal:
    """Appends to a file; each line is on disk before `write` returns, or waits in memory while the disk is full."""

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self.left = bytearray()  # what is not in the file yet
        self._failed = False
        if os.fstat(self.file).st_size and path.read_bytes()[-1:] != b"\n":  # the writer was killed within a line
            self.left += b"\n"

    def write(self, kind: str, generation: int, **values: Any) -> dict[str, Any]:
        """Append one line and return it. Raises ValueError for a kind or field that KINDS does not list."""
        if kind not in KINDS or set(values) - set(KINDS[kind]):
            raise ValueError(f"the journal has no {kind} with {sorted(values)}; see KINDS")
        row = {"time": time.time(), "kind": kind, "generation": generation, **without_secrets_in(values)}
        self.left += json.dumps(row).encode() + b"\n"
        self.flush()
        return row

    def flush(self) -> None:
        """Write what is left. A disk that is full or fails ends no run: it is told, and tried again later."""
        try:
            while self.left:  # of a line that the disk has no room for, a part may be written
                del self.left[: os.write(self.file, self.left)]
                if not self.left:
                    os.fsync(self.file)
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._failed = True
                say(f"the journal cannot be written ({error.strerror}); decisions are still made, its lines wait")

    def close(self) -> None:
        self.flush()
        os.close(self.file)


CLEANED = ("command", "text", "reason", "evidence", "delivered")  # what people and programs have written


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


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a journal; a line that was cut off by a kill is left out."""
    with open(path, errors="replace") as file:
        for line in file:
            try:
                row = parsed(line)
            except ValueError:
                continue
            if isinstance(row, dict) and row.get("kind") in KINDS:
                yield row


def sound(row: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a line that are of their kind: a disk may have damaged it, or another version written it."""
    return {
        name: value
        for name, value in row.items()
        if (name not in NUMBERS or isinstance(value, (int, float)) and abs(value) < LARGEST)
        and (name not in TEXTS or isinstance(value, str))
    }


def find(place: Path) -> Path:
    """Return the journal of a run: `place` is its run directory, the folder `aegis` in it, or the journal itself."""
    for path in (place, place / NAME, place / "aegis" / NAME):
        if path.is_file():
            if path.open("rb").read(1) and next(read(path), None) is None:
                raise mistake("RUN_DIR", path, problem="is no journal of zaya aegis: no line of it is a known fact")
            return path
    problem = "has no journal of zaya aegis" if place.exists() else "does not exist"
    allowed = f"a run directory with aegis/{NAME}, the folder that holds it, or the file"
    raise mistake("RUN_DIR", place, problem=problem, allowed=allowed)
