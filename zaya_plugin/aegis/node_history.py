# SPDX-License-Identifier: Apache-2.0
"""On which nodes the next attempt runs, and the history of nodes across a user's runs: in every cluster a few nodes
cause most failures.

The history is <state>/zaya_plugin/nodes.jsonl of the user's home: one line of JSON for each time that a run gave a node
up, or would have done so with a spare.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from zaya_plugin.aegis.diagnose.cluster import Cluster
from zaya_plugin.aegis.diagnose.evidence import parsed

HISTORY_SECONDS = 30 * 86400.0
QUARANTINE_FAILURES = 3  # failures in that time; the node is then only used where no other one is left


def state_file() -> Path:
    """Return the file of this user, by the XDG rules."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(base) / "zaya_plugin" / "nodes.jsonl"


class NodeHistory:
    """Failures by node. A file that cannot be read or written does not fail the run."""

    def __init__(self) -> None:
        self.path = state_file()
        self.failures: Counter[str] = Counter()
        self.read()

    def read(self) -> None:
        """Count the failures of the last days, also those that other runs have written since."""
        since = time.time() - HISTORY_SECONDS
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
        """Write that `node` has failed in a run, because of `cause`."""
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
        return self.failures[node] >= QUARANTINE_FAILURES


def available(connected: Collection[str], cluster: Cluster, history: NodeHistory) -> list[str]:
    """Return the nodes that an attempt may use: those of the last one, then the others by failures in all runs."""
    nodes = [node for node in connected if node not in cluster.out]
    exchanged = cluster.pending.nodes_out if cluster.pending else ()  # such a node may be back already
    known = [node for node in cluster.nodes if node in nodes and node not in exchanged]
    others = [node for node in nodes if node not in known]
    return known + sorted(others, key=lambda node: (history.failures[node], node))


def quarantined(nodes: Sequence[str], size: int, cluster: Cluster, history: NodeHistory) -> list[str]:
    """Return the nodes of `nodes` with a history that a first attempt would use."""
    if any(node in nodes for node in cluster.nodes):
        return []
    return [node for node in nodes[:size] if history.quarantined(node)]


def in_order(nodes: Sequence[str], size: int, cluster: Cluster) -> tuple[str, ...]:
    """Return the nodes of the next attempt, the first ones of `nodes`: a spare takes the place of the node that it
    replaces.
    """
    kept = [node for node in cluster.nodes if node in nodes[:size]]
    spares = [node for node in nodes[:size] if node not in kept]
    if len(cluster.nodes) == size:
        order = [node if node in kept else spares.pop(0) for node in cluster.nodes]
    else:
        order = kept + spares
    turn = cluster.turns % size
    return tuple(order[turn:] + order[:turn])
