# SPDX-License-Identifier: Apache-2.0
"""Read metrics.jsonl, which a run may be writing: one object a step or validation. A line that a kill has cut off, or
that is not written whole yet, is left out.
"""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

NAME = "metrics.jsonl"
TAIL_BYTES = 65536
MOST_DIGITS = 15  # of a whole number: fp64 and an array of int64 hold it


def rows(path: Path, advance: Callable[[int], object] = lambda size: None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file. advance: is called with the bytes of each line."""
    with open(path, "rb") as file:
        for line in file:
            advance(len(line))
            if (row := row_of(line)) is not None:
                yield row


def last_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows at the end of a file, the last one first; they are those of its last TAIL_BYTES."""
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        if (row := row_of(line)) is not None:
            yield row


def row_of(line: bytes) -> dict[str, Any] | None:
    """Return the row of a line; None: it is none, is not whole, or has no step from 0 to 10^15.

    A longer whole number becomes a float, which is infinite above fp64's range. NaN and infinite values stay: a run that
    diverges writes them.
    """
    with contextlib.suppress(ValueError, RecursionError):
        row = json.loads(line, parse_int=_number)
        if isinstance(row, dict) and type(step := row.get("step")) is int and step >= 0:
            return row
    return None


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) <= MOST_DIGITS else float(digits)
