# SPDX-License-Identifier: Apache-2.0
"""From evidence to the first cause of a failure: collects the evidence of all ranks and kernels on one clock,
classifies each new item, and names the cause.

A row with the role `root` can be the cause. Time-outs and resets by a peer never are: they are cascades of a failure
elsewhere. Confirmations join the cause of their node. Of several causes the surest counts, and of equally sure ones
the earliest, because a failure of one rank makes others fail too.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from zaya_plugin.aegis.diagnose.cluster import Cluster
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.aegis.diagnose.rules import Rule, Rules
from zaya_plugin.aegis.protocol import Diagnosis
from zaya_plugin.ground.secrets import without_secrets

LOOKBACK = 900.0  # seconds before the first sign of a failure: a collective's time-out of 10 minutes and a margin
JOIN = 60.0  # seconds before and after a cause in which confirmations of its node belong to it
SURVIVED = 60.0  # seconds of progress after which a fault has not ended the run
SHOWN = 12  # lines of evidence that a diagnosis keeps
WEIGHT = {"sure": 4, "likely": 3, "weak": 2}
TIME_OUTS = ("watchdog", "watchdog_exit", "gloo_timeout")
NAMES_LAGGARD = ("missing_rank", "watchdog_last")
UNKNOWN = "unknown"
MAX_EVIDENCE = 20_000  # pieces that are kept
PROBE_SECONDS = 3.0  # in which probes of other nodes separate a broken disk or mount from a broken file server
LISTED_RULES = ("slow_rank", "packets_lost")  # watched, and worth a row of the journal
# The reaction to a piece of evidence: decide while the ranks run, diagnose a failure, or write a row.
DECIDE, DIAGNOSE, RECORD = "decide", "diagnose", "record"


class Observations:
    """The evidence of an attempt.

    symptom: the evidence that started the diagnosis. held_hang: a hang while a fault may end by itself.
    storage_error: one that waits for the probes of other nodes.
    """

    def __init__(self, rules: Rules, cluster: Cluster):
        self.rules, self.cluster = rules, cluster
        self.evidence: deque[Evidence] = deque(maxlen=MAX_EVIDENCE)
        self.begin_attempt()

    def begin_attempt(self) -> None:
        """Forget the attempt before. Recent lines of kernels are kept:
        they may explain a failure of the next one too.
        """
        since = time.time() - LOOKBACK
        self.evidence = deque(
            (item for item in self.evidence if item.time > since and item.source == "kernel"), MAX_EVIDENCE
        )
        self.symptom: Evidence | None = None
        self.held_hang: Evidence | None = None
        self.storage_error: Evidence | None = None
        self._ridden: set[tuple[str, str | None]] = set()
        self._listed: set[tuple[str, str, int | None]] = set()

    def add(self, evidence: Evidence, generation: int | None = None) -> str | None:
        """Keep evidence, and return the reaction to it. generation: of the rank that wrote it, if known."""
        self.evidence.append(evidence)
        rule = self.rules.get(evidence.rule)
        if generation is not None and generation != self.cluster.generation and evidence.source == "rank":
            return None
        if rule is None or evidence.node not in self.cluster.nodes or not self.cluster.running:
            return None
        if rule.role != "root":
            key = (rule.name, evidence.node, evidence.rank)
            if rule.name not in LISTED_RULES or key in self._listed:
                return None
            self._listed.add(key)
            return DECIDE
        place = (rule.name, evidence.node)
        if evidence.values.get("recovered"):
            self._ridden.discard(place)
        elif rule.name == "hang" and self.rides():
            self.held_hang = evidence
        elif self._ends_attempt(rule):
            return DIAGNOSE
        elif rule.action == "ride" and place not in self._ridden:
            self._ridden.add(place)
            return DECIDE
        elif rule.severity in ("fatal", "high") and place not in self._ridden:
            self._ridden.add(place)  # it may explain a failure that follows
            if rule.action == "exchange" and evidence.source == "storage":
                self.storage_error = evidence
            return RECORD
        return None

    def _ends_attempt(self, rule: Rule) -> bool:
        """Whether evidence of a row alone ends the attempt, though all ranks live: it is sure,
        or the agents report it.
        """
        sure = rule.confidence == "sure" and rule.action in ("exchange", "rollback")
        return sure or rule.affects == "node" or rule.name == "hang"

    def due(self) -> Evidence | None:
        """Return evidence that was held back and is to be diagnosed now."""
        if self.held_hang is not None and not self.rides():
            return self.held_hang
        if self.storage_error is not None and time.time() - self.storage_error.time > PROBE_SECONDS:
            storage_error, self.storage_error = self.storage_error, None
            return storage_error if self.cluster.spares and self._is_alone(storage_error) else None
        return None

    def _is_alone(self, evidence: Evidence) -> bool:
        """Whether no other node reports the same: then the fault is the node's, not the file server's."""
        return not any(
            item.rule == evidence.rule and item.source == evidence.source and item.node != evidence.node
            for item in self.evidence
        )

    def rides(self) -> bool:
        """Whether a fault lasts that may end by itself, such as a file server that does not respond."""
        over = {(item.rule, item.node): item.time for item in self.evidence if item.values.get("recovered")}
        return any(
            (rule := self.rules.get(item.rule)) is not None
            and (rule.action, rule.role) == ("ride", "root")
            and not item.values.get("recovered")
            and over.get((item.rule, item.node), 0) < item.time
            and time.time() - item.time < rule.ride
            for item in self.evidence
        )

    def has_exit(self, node: str, rank: int) -> bool:
        """Whether the agent of `node` has reported the end of this rank."""
        return any(item.source == "exit" and item.node == node and item.rank == rank for item in self.evidence)

    def name_missing(self, world: Collection[int], ranks_per_node: int) -> None:
        """Of the flight recorders' dumps after a hang: add the rank that did not arrive."""
        if any(item.rule == "missing_rank" for item in self.evidence):
            return
        dumps = {item.rank: item.values for item in self.evidence if item.rule == "flight_record"}
        ranks, why = missing_ranks(dumps, world)
        for rank in ranks:
            node = self.cluster.node_of(rank, ranks_per_node)
            self.evidence.append(Evidence(self.symptom.time, node, "agent", why, rank, "missing_rank"))

    def diagnose(self, stepped: float) -> Diagnosis:
        """Name the cause of the symptom. stepped: the time of the last step."""
        progress = []
        if self.cluster.first_step is not None and self.symptom is not None:
            at = min(stepped, self.symptom.time)
            progress = [Evidence(at, "", "progress", "made a step", values={"step": self.cluster.step})]
        since = time.time() - LOOKBACK
        nodes = (*self.cluster.nodes, "")  # what happens on a spare explains nothing
        # The symptom counts whatever its clock says.
        relevant = [item for item in self.evidence if item is self.symptom or item.time > since and item.node in nodes]
        return diagnose(relevant + progress, self.rules)

    def unkillable(self) -> set[str]:
        """Return the nodes of the attempt on which processes have survived SIGKILL."""
        return {item.node for item in self.evidence if item.rule == "unkillable" and item.node in self.cluster.nodes}

    def failed_code(self) -> int:
        """Return the exit code of the first rank that failed, as a shell shows it."""
        exits = sorted((item for item in self.evidence if item.source == "exit"), key=lambda item: item.time)
        codes = [int(item.values.get("exit_code", 1)) for item in exits]
        last = self.cluster.failures[-1].cause if self.cluster.failures else ""
        without_exit = self.rules["hang"].exit_code[0] if last == "hang" else 1
        code = 2 if 2 in codes else next(iter(codes), without_exit)
        return 128 - code if code < 0 else code or 1


def diagnose(evidence: Sequence[Evidence], rules: Rules) -> Diagnosis:
    """Name the first cause of `evidence`, in any order. Exit codes need no rule; lines without one are left out.

    Evidence of the source "progress" without a rule says that the run still made steps at that time: faults of more
    than SURVIVED seconds before did not end it.
    """
    survived = max((item.time for item in evidence if _is_progress(item)), default=float("-inf")) - SURVIVED
    pairs = [(item, rule) for item in evidence if (rule := _rule(item, rules)) is not None]
    pairs.sort(key=lambda pair: pair[0].time)
    over = {id(item) for item, rule in pairs if _is_over(item, rule, pairs)}
    codes = {(item.node, item.rank): item.values.get("exit_code") for item, _ in pairs if item.source == "exit"}
    # A message may look like one about a mistake; the exit code of the same rank says whether it was one.
    named = [
        (item, rule) for item, rule in pairs if not _is_denied(item, rule, codes) and not item.values.get("recovered")
    ]
    roots = [(item, rule) for item, rule in named if rule.role == "root" and _is_frequent(item, rule, named)]
    consequences = [item.time for item, rule in named if rule.role == "cascade" or item.source in ("exit", "progress")]
    since = min(consequences, default=float("inf")) - LOOKBACK
    roots = [pair for pair in roots if since <= pair[0].time] or roots
    chosen = max(roots, key=lambda pair: (_weight(*pair, over, survived), -pair[0].time), default=None)
    laggard = _laggard(named)
    if chosen is None:
        chosen = _without_root(named, laggard, rules)
    if chosen is None:
        first = [item for item, _ in named[:1]]
        return Diagnosis(first=first[0].time if first else None, evidence=first, cascades=_count(named))
    return _result(*chosen, named, laggard)


def _rule(evidence: Evidence, rules: Rules) -> Rule | None:
    if evidence.rule is None and evidence.source == "exit":
        return rules.of_exit(int(evidence.values.get("exit_code", 1)))
    return rules.get(evidence.rule)


def _is_denied(evidence: Evidence, rule: Rule, codes: Mapping[tuple[str, int | None], Any]) -> bool:
    return rule.name == "user_error" and evidence.source == "rank" and codes.get((evidence.node, evidence.rank), 2) != 2


def _is_progress(evidence: Evidence) -> bool:
    return evidence.source == "progress" and evidence.rule is None


def _is_over(evidence: Evidence, rule: Rule, pairs: Sequence[tuple[Evidence, Rule]]) -> bool:
    """Whether a fault that ends by itself, such as a link that flaps, has ended within the time that it may last."""
    return rule.ride > 0 and any(
        other.rule == evidence.rule
        and other.values.get("recovered")
        and other.node == evidence.node
        and other.values.get("device") in (None, evidence.values.get("device"))
        and 0 <= other.time - evidence.time <= rule.ride
        for other, _ in pairs
    )


def _is_frequent(evidence: Evidence, rule: Rule, named: Sequence[tuple[Evidence, Rule]]) -> bool:
    """Whether the row's count is reached on this node, in the seconds before the line or after it."""
    if rule.count <= 1:
        return True
    times = [other.time for other, same in named if same.name == rule.name and other.node == evidence.node]
    return any(
        last - first <= rule.within and first <= evidence.time <= last
        for first, last in zip(times, times[rule.count - 1 :], strict=False)
    )


def _weight(evidence: Evidence, rule: Rule, over: set[int], survived: float) -> int:
    """How sure it is that this is the cause. What may end by itself weighs less than what cannot."""
    if id(evidence) in over or evidence.time < survived:
        return 0
    weight = WEIGHT[rule.confidence]
    return min(weight - 1, WEIGHT["weak"]) if rule.action == "ride" else weight


def _laggard(named: Sequence[tuple[Evidence, Rule]]) -> Evidence | None:
    """Return the line of the rank that did not arrive: the lowest last enqueued number, if one is lower than others."""
    missing = next((item for item, rule in named if rule.name == "missing_rank"), None)
    if missing is not None:
        return missing
    # The first line of each rank: the earlier ones come last, and replace the later ones.
    numbers = {item.rank: item for item, _ in reversed(named) if "enqueued" in item.values}
    if len({item.values["enqueued"] for item in numbers.values()}) < 2:
        return None
    return min(numbers.values(), key=lambda item: (item.values["enqueued"], item.time))


def _without_root(
    named: Sequence[tuple[Evidence, Rule]], laggard: Evidence | None, rules: Rules
) -> tuple[Evidence, Rule] | None:
    """Of evidence without a possible cause: a hang if something timed out, then a confirmation,
    then what is watched.
    """
    if laggard is not None or any(rule.name in TIME_OUTS for _, rule in named):
        first = laggard or next(item for item, rule in named if rule.name in TIME_OUTS)
        return (first, rules["hang"]) if "hang" in rules else None
    is_cascade = any(rule.role == "cascade" for _, rule in named)
    confirmations = [
        pair for pair in named if pair[1].role == "confirmation" and not (is_cascade and pair[1].name == "rank_failed")
    ]
    watched = [] if is_cascade else [pair for pair in named if pair[1].role == "watch"]
    return next(iter(confirmations + watched), None)


def _result(root: Evidence, rule: Rule, named: Sequence[tuple[Evidence, Rule]], laggard: Evidence | None) -> Diagnosis:
    shown = root
    if root.source == "slurm" and "host" not in root.values:  # several lines about one event, and one names the node
        same = (item for item, other in named if other is rule and abs(item.time - root.time) <= JOIN)
        shown = next((item for item in same if "host" in item.values), root)
    node, rank, joined = shown.node, shown.rank, [] if shown is root else [shown]
    if rule.name == "hang":
        # The rank that reports a time-out is not the one that hangs.
        timed_out = root.rule in TIME_OUTS
        node, rank = (laggard.node, laggard.rank) if laggard else (None, None) if timed_out else (node, rank)
        joined = [laggard] if laggard and laggard is not root else []
    if rule.severity == "policy" and "host" not in shown.values and root.source != "exit":
        node = None  # SLURM names the node that wrote the line
    node = node or None
    for item, other in named:
        if item is root or item in joined or other.name in NAMES_LAGGARD:
            continue
        same_process = root.values.get("pid") is not None and item.values.get("pid") == root.values["pid"]
        if same_process and item.node == root.node and rank is None:
            rank = item.rank
        near = abs(item.time - root.time) <= JOIN and item.node == root.node
        own = item.rank is not None and item.rank == rank and (item.source == "exit" or other is rule)
        if near and other.role == "confirmation" and item.rank in (None, rank) or own or same_process:
            joined.append(item)
    kept = {id(item) for item in (root, *joined)}
    return Diagnosis(
        cause=rule.name,
        node=node,
        rank=rank,
        role=rule.role,
        severity=rule.severity,
        confidence=rule.confidence,
        first=root.time,
        evidence=[root, *joined][:SHOWN],
        cascades=_count([pair for pair in named if id(pair[0]) not in kept]),
        fingerprint=_fingerprint(root, rule, node, rank),
    )


def _count(named: Sequence[tuple[Evidence, Rule]]) -> dict[str, int]:
    """Count what followed, the most frequent first; what is only watched does not count."""
    return dict(Counter(rule.name for _, rule in named if rule.role != "watch").most_common())


def _fingerprint(root: Evidence, rule: Rule, node: str | None, rank: int | None) -> str:
    if rule.repeats == "node":
        return f"{rule.name} on {node}"
    if rule.repeats == "rank":
        return f"{rule.name} of rank {rank}"
    if rule.repeats == "frame":
        text = without_secrets(str(root.values.get("exception", root.text[:80])))  # it goes into the journal
        return f"{rule.name} {text} at {root.values.get('frame', '?')}"
    return rule.name


def missing_ranks(by_rank: Mapping[int, Mapping[str, Any]], world: Collection[int] = ()) -> tuple[list[int], str]:
    """Return the ranks that others wait for, and a sentence that says why; [] if all have enqueued the same.

    by_rank: the values of the evidence flight_record, of all nodes and one request. world: all ranks of the job. One
    without a dump, while others have theirs, did not even answer its supervisor: it is stopped, has ended, or holds the
    interpreter.
    """
    if silent := sorted(set(world) - by_rank.keys()) if by_rank else []:
        return silent, f"{_ranks(silent)} wrote no dump, and {len(by_rank)} other(s) did"
    groups: dict[str, dict[int, int]] = {}
    for rank, record in by_rank.items():
        for name, number in record["enqueued"].items():
            groups.setdefault(name, {})[rank] = number
    behind: dict[int, tuple[str, int, int]] = {}  # rank -> group, its number, the others' number
    waiting = set()
    for name, numbers in groups.items():
        most = max(numbers.values())
        late = {rank: number for rank, number in numbers.items() if number < most}
        if late:
            waiting |= {rank for rank in numbers if rank not in late and by_rank[rank]["last"]["group"] == name}
            for rank, number in late.items():
                if rank not in behind or number - most < behind[rank][1] - behind[rank][2]:
                    behind[rank] = name, number, most
    first = sorted(behind.keys() - waiting) or sorted(behind)
    if not first:
        return [], "all ranks have enqueued the same collectives"
    name, number, most = behind[first[0]]
    return first, f"{_ranks(first)} enqueued collective {number} of group {name} last, and others {most}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
