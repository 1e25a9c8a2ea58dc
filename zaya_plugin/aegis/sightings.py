# SPDX-License-Identifier: Apache-2.0
"""Collect evidence from all nodes, classify each new item, and request a diagnosis."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection

from zaya_plugin.aegis.cluster import Cluster
from zaya_plugin.aegis.collectors.flight_recorder import missing
from zaya_plugin.aegis.decide import GONE
from zaya_plugin.aegis.diagnose import LOOKBACK, Diagnosis, diagnosis
from zaya_plugin.aegis.evidence import Evidence
from zaya_plugin.aegis.exit_codes import HANG
from zaya_plugin.aegis.rules import Rules

KEPT = 20_000  # pieces of evidence
PROBE_SECONDS = 3.0  # in which the storage probes of other nodes tell a broken disk or mount from a broken file server
LISTED_RULES = ("slow_rank", "packets_lost")  # watched, and worth a line of the journal
# What a piece of evidence calls for: a decision while the ranks run, a look for the cause of a failure, or a line.
JUDGE, LOOK, NOTE = "judge", "look", "note"


class Sightings:
    """symptom: what made the decision maker look for a cause. hanging: a hang while something is waited for.

    doubted: a storage error, of one node or of all.
    """

    def __init__(self, rules: Rules, cluster: Cluster):
        self.rules, self.cluster = rules, cluster
        self.evidence: deque[Evidence] = deque(maxlen=KEPT)
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Forget the attempt before; what kernels have said lately may explain a failure of the next one too."""
        since = time.time() - LOOKBACK
        self.evidence = deque((item for item in self.evidence if item.time > since and item.source == "kernel"), KEPT)
        self.symptom: Evidence | None = None
        self.hanging: Evidence | None = None
        self.doubted: Evidence | None = None
        self._ridden: set[tuple[str, str | None]] = set()
        self._told: set[tuple[str, str, int | None]] = set()

    def add(self, evidence: Evidence, generation: int | None = None) -> str | None:
        """Keep evidence, and return what it calls for. generation: of the rank that wrote it, if known."""
        self.evidence.append(evidence)
        rule = self.rules[evidence.rule] if evidence.rule in self.rules else None
        if generation is not None and generation != self.cluster.generation and evidence.source == "rank":
            return None
        if rule is None or evidence.node not in self.cluster.nodes or not self.cluster.running:
            return None
        if rule.role != "root":
            key = (rule.name, evidence.node, evidence.rank)
            if rule.name not in LISTED_RULES or key in self._told:
                return None
            self._told.add(key)
            return JUDGE
        place = (rule.name, evidence.node)
        if evidence.values.get("recovered"):
            self._ridden.discard(place)
        elif rule.name == "hang" and self.rides():
            self.hanging = evidence
        elif self._ends_now(evidence):
            return LOOK
        elif rule.action == "ride" and place not in self._ridden:
            self._ridden.add(place)
            return JUDGE
        elif rule.severity in ("fatal", "high") and place not in self._ridden:
            self._ridden.add(place)  # kept: it may explain a failure that follows
            if rule.action == "exchange" and evidence.source == "storage":
                self.doubted = evidence
            return NOTE
        return None

    def _ends_now(self, evidence: Evidence) -> bool:
        """Whether this alone ends the attempt, though all ranks live: it is sure, or it comes from the agents."""
        rule = self.rules[evidence.rule]
        return rule.name in (*GONE, "hang") or (rule.confidence == "sure" and rule.action in ("exchange", "rollback"))

    def due(self) -> Evidence | None:
        """Return evidence that was held back and now makes the decision maker look."""
        if self.hanging is not None and not self.rides():
            return self.hanging
        if self.doubted is not None and time.time() - self.doubted.time > PROBE_SECONDS:
            doubted, self.doubted = self.doubted, None
            return doubted if self.cluster.spares and self._is_alone(doubted) else None
        return None

    def _is_alone(self, evidence: Evidence) -> bool:
        """Whether no other node says the same: then the fault is the node's, not the file server's."""
        return not any(
            item.rule == evidence.rule and item.source == evidence.source and item.node != evidence.node
            for item in self.evidence
        )

    def rides(self) -> bool:
        """Whether something is waited for that may end by itself, such as a file server that does not respond."""
        over = {(item.rule, item.node): item.time for item in self.evidence if item.values.get("recovered")}
        return any(
            item.rule in self.rules
            and self.rules[item.rule].action == "ride"
            and self.rules[item.rule].role == "root"
            and not item.values.get("recovered")
            and over.get((item.rule, item.node), 0) < item.time
            and time.time() - item.time < self.rules[item.rule].ride
            for item in self.evidence
        )

    def has_exit(self, node: str, rank: int) -> bool:
        """Whether the agent of `node` has told why this rank has ended."""
        return any(item.source == "exit" and item.node == node and item.rank == rank for item in self.evidence)

    def name_missing(self, world: Collection[int], ranks_per_node: int) -> None:
        """Of the flight recorders' dumps after a hang: add the rank that did not arrive."""
        if any(item.rule == "missing_rank" for item in self.evidence):
            return
        dumps = {item.rank: item.values for item in self.evidence if item.rule == "flight_record"}
        ranks, why = missing(dumps, world)
        for rank in ranks:
            node = self.cluster.node_of(rank, ranks_per_node)
            self.evidence.append(Evidence(self.symptom.time, node, "agent", why, rank, "missing_rank"))

    def diagnose(self, stepped: float) -> Diagnosis:
        """Name the cause of the symptom. stepped: when the last step was seen."""
        progress = []
        if self.cluster.first_step is not None and self.symptom is not None:
            at = min(stepped, self.symptom.time)
            progress = [Evidence(at, "", "progress", "made a step", values={"step": self.cluster.step})]
        since = time.time() - LOOKBACK
        nodes = (*self.cluster.nodes, "")  # what happens on a spare explains nothing
        relevant = [
            item for item in self.evidence if item is self.symptom or item.time > since and item.node in nodes
        ]  # the symptom counts whatever its clock says
        return diagnosis(relevant + progress, self.rules)

    def unkillable(self) -> set[str]:
        """Return the nodes of the attempt on which processes have survived SIGKILL."""
        return {item.node for item in self.evidence if item.rule == "unkillable" and item.node in self.cluster.nodes}

    def failed_code(self) -> int:
        """Return the exit code of the first rank that failed, as a shell shows it."""
        exits = sorted((item for item in self.evidence if item.source == "exit"), key=lambda item: item.time)
        codes = [int(item.values.get("exit_code", 1)) for item in exits]
        last = self.cluster.failures[-1].cause if self.cluster.failures else ""
        code = next((code for code in codes if code == 2), codes[0] if codes else HANG if last == "hang" else 1)
        return 128 - code if code < 0 else code or 1
