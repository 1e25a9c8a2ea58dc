# SPDX-License-Identifier: Apache-2.0
"""Names the first cause of a failure from the evidence of all ranks and kernels on one clock.

A row with the role `root` can be the cause. Time-outs and resets by a peer never are: they are cascades of a failure
elsewhere. Confirmations join the cause of their node. Of several causes the surest counts, and of equally sure ones
the earliest, because a failure of one rank makes others fail too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from zaya_plugin.aegis.evidence import Evidence
from zaya_plugin.aegis.exit_codes import meaning
from zaya_plugin.aegis.rules import Rule, Rules
from zaya_plugin.ground.secrets import without_secrets

LOOKBACK = 900.0  # seconds before the first sign of a failure: a collective's time-out of 10 minutes and a margin
JOIN = 60.0  # seconds before and after a cause in which confirmations of its node belong to it
SURVIVED = 60.0  # seconds of progress after which a fault has not ended the run
SHOWN = 12  # lines of evidence that a diagnosis keeps
WEIGHT = {"sure": 4, "likely": 3, "weak": 2}
TIME_OUTS = ("watchdog", "watchdog_exit", "gloo_timeout")
NAMES_LAGGARD = ("missing_rank", "watchdog_last")
UNKNOWN = "unknown"


@dataclass(frozen=True)
class Diagnosis:
    """The first cause, or "unknown".

    first: the time of the cause. evidence: its line first, then the confirmations. cascades: row -> how many lines.
    fingerprint: the same text for the same cause again; see `Rule.repeats`.
    """

    cause: str = UNKNOWN
    node: str | None = None
    rank: int | None = None
    role: str = "root"
    severity: str = "high"
    confidence: str = "weak"
    first: float | None = None
    evidence: list[Evidence] = field(default_factory=list)
    cascades: dict[str, int] = field(default_factory=dict)
    fingerprint: str = UNKNOWN

    def to_json(self) -> dict[str, Any]:
        """Return the fields of a line of the journal."""
        return asdict(self) | {"evidence": [item.to_json() for item in self.evidence]}

    @classmethod
    def from_json(cls, row: dict[str, Any]) -> Diagnosis:
        """Return the diagnosis of a line of the journal; its other fields are left out."""
        values = {name: row[name] for name in cls.__dataclass_fields__ if name in row}
        return cls(**values | {"evidence": [Evidence.from_json(item) for item in values.get("evidence", [])]})


def diagnosis(evidence: Sequence[Evidence], rules: Rules) -> Diagnosis:
    """Name the first cause of `evidence`, in any order. Exit codes need no rule; lines without one are left out.

    Evidence of the source "progress" without a rule says that the run still made steps at that time: faults of more
    than SURVIVED seconds before did not end it.
    """
    survived = max((item.time for item in evidence if _is_progress(item)), default=float("-inf")) - SURVIVED
    seen = sorted(
        ((item, rules[name]) for item in evidence if (name := _name(item)) in rules), key=lambda pair: pair[0].time
    )
    over = {id(item) for item, rule in seen if _is_over(item, rule, seen)}
    codes = {(item.node, item.rank): item.values.get("exit_code") for item, _ in seen if item.source == "exit"}
    # A message may look like one about a mistake; the exit code of the same rank says whether it was one.
    spoken = [(item, rule) for item, rule in seen if not _is_denied(item, rule, codes)]
    named = [(item, rule) for item, rule in spoken if not item.values.get("recovered")]
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


def _name(evidence: Evidence) -> str | None:
    if evidence.rule is None and evidence.source == "exit":
        return meaning(int(evidence.values.get("exit_code", 1))).rule
    return evidence.rule


def _is_denied(evidence: Evidence, rule: Rule, codes: Mapping[tuple[str, int | None], Any]) -> bool:
    return rule.name == "user_error" and evidence.source == "rank" and codes.get((evidence.node, evidence.rank), 2) != 2


def _is_progress(evidence: Evidence) -> bool:
    return evidence.source == "progress" and evidence.rule is None


def _is_over(evidence: Evidence, rule: Rule, seen: Sequence[tuple[Evidence, Rule]]) -> bool:
    """Whether a fault that ends by itself, such as a link that flaps, has ended within the time that it may last."""
    return rule.ride > 0 and any(
        other.rule == evidence.rule
        and other.values.get("recovered")
        and other.node == evidence.node
        and other.values.get("device") in (None, evidence.values.get("device"))
        and 0 <= other.time - evidence.time <= rule.ride
        for other, _ in seen
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
    numbers = {
        item.rank: item for item, rule in reversed(named) if "enqueued" in item.values
    }  # the first line of each rank
    if len({item.values["enqueued"] for item in numbers.values()}) < 2:
        return None
    return min(numbers.values(), key=lambda item: (item.values["enqueued"], item.time))


def _without_root(
    named: Sequence[tuple[Evidence, Rule]], laggard: Evidence | None, rules: Rules
) -> tuple[Evidence, Rule] | None:
    """Of evidence without a possible cause: a hang if something timed out, then a confirmation, then what is watched."""
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
