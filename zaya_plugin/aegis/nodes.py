# SPDX-License-Identifier: Apache-2.0
"""The history of nodes across a user's runs: in every cluster a few nodes cause most failures.

One line of JSON for each time that a run gave a node up, or would have if another one had been there, in <state>/zaya_plugin/nodes.jsonl of the user's home.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from pathlib import Path

from zaya_plugin.aegis.evidence import parsed

KEPT_SECONDS = 30 * 86400.0
QUARANTINE = 3  # failures in that time; the node is then only used where no other one is left


def state_file() -> Path:
    """Return the file of this user, by the XDG rules."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "zaya_plugin" / "nodes.jsonl"


class Nodes:
    """Failures by node. A file that cannot be read or written is no failure of the run."""

    def __init__(self, path: Path | None = None, now: float | None = None):
        self.path = state_file() if path is None else path
        self.failures: Counter[str] = Counter()
        self.read(now)

    def read(self, now: float | None = None) -> None:
        """Count the failures of the last days, also those that other runs have written since."""
        since = (time.time() if now is None else now) - KEPT_SECONDS
        try:
            lines = self.path.read_text(errors="replace").splitlines()
        except OSError:
            return
        self.failures.clear()
        for line in lines:
            try:
                row = parsed(line)
                if row["time"] >= since:
                    self.failures[str(row["node"])] += 1
            except (ValueError, KeyError, TypeError):
                continue

    def add(self, node: str, cause: str, run: str) -> None:
        """Write down that `node` has failed in a run, because of `cause`."""
        self.failures[node] += 1
        row = json.dumps({"time": time.time(), "node": node, "cause": cause, "run": run}) + "\n"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with open(self.path, "ab+") as file:  # one short line: whole, also if two runs write
                if file.tell():
                    file.seek(-1, os.SEEK_END)
                    row = row if file.read() == b"\n" else f"\n{row}"  # the disk had no room for all of the line before
                file.write(row.encode())
        except OSError:
            pass

    def quarantined(self, node: str) -> bool:
        """Whether a node failed so often that others are taken first, also at the start of a run."""
        return self.failures[node] >= QUARANTINE
