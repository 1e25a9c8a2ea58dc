# SPDX-License-Identifier: Apache-2.0
"""One observation of an agent: a line of a log, an exit code, a counter that grew, a rank without progress."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field
from typing import Any

TEXT = 500  # characters of a line that are kept
LARGEST_NUMBER = 1e15  # that a message, a heartbeat or a line of the journal may hold


@dataclass(frozen=True)
class Evidence:
    """An observation, with its place and time.

    time: seconds since 1970, by the decider's clock once an agent has sent it.
    source: kernel, rank, exit, progress, counter, link, host, storage, checkpoint, agent or slurm.
    text: as it may be shown to a person; see `printable`.
    rule: the name of a row of rules.yaml; None: a line that was not compared with the rules yet.
    values: numbers and names of the observation, such as {"step": 12, "exit_code": -9}.
    """

    time: float
    node: str
    source: str
    text: str
    rank: int | None = None
    rule: str | None = None
    values: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the fields that are set, for the journal and the network."""
        return {name: value for name, value in asdict(self).items() if value not in (None, {})}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Evidence:
        """Return the evidence that `to_json` described. Raises TypeError for an unknown, missing or wrong field."""
        evidence = cls(**values)
        texts = (evidence.node, evidence.source, evidence.text, evidence.rule or "")
        valid = all(isinstance(text, str) for text in texts) and isinstance(evidence.values, dict)
        if not valid or not is_number(evidence.time) or not isinstance(evidence.rank, (int, type(None))):
            raise TypeError("a field of evidence is of another type")
        return evidence


def is_number(value: object, kind: type | tuple[type, ...] = (int, float)) -> bool:
    """Whether a value that another program has written is a number that can be calculated with."""
    return isinstance(value, kind) and not isinstance(value, bool) and abs(value) < LARGEST_NUMBER


def parsed(text: str | bytes) -> Any:
    """Return the value of a JSON text that another program has written. Raises ValueError for text that is not JSON."""
    try:
        return json.loads(text)
    except RecursionError:  # a million brackets
        raise ValueError("JSON that is nested too deep") from None


def print_line(text: str) -> None:
    """Print a line for a person. A terminal or pipe that is closed ends no run: the journal has every fact."""
    try:
        print(f"zaya aegis: {text}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        pass


def printable(line: str | bytes) -> str:
    """Return `line` without control characters, at most TEXT characters long: it may come from any program."""
    if isinstance(line, bytes):
        line = line[: 4 * TEXT].decode(errors="replace")
    return "".join(letter if letter.isprintable() else " " for letter in line[:TEXT]).strip()
