# SPDX-License-Identifier: Apache-2.0
"""The present state of a supervised run, from its journal and the last line of metrics.jsonl. Nothing is written and no
process is asked, so this works on any host that sees the run directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zaya_plugin.aegis.account import Account
from zaya_plugin.aegis.bookkeeping import ENDING, account, first_text
from zaya_plugin.aegis.diagnose.cluster import Cluster
from zaya_plugin.aegis.diagnose.evidence import printable
from zaya_plugin.aegis.protocol import (
    BACK,
    JOINED,
    LOST,
    OUT,
    AttemptStart,
    Begin,
    Decision,
    Diagnosis,
    End,
    NodeChange,
    Progress,
    Row,
    Symptom,
)
from zaya_plugin.aegis.report import percent
from zaya_plugin.ground import metrics_file
from zaya_plugin.ground.durations import duration
from zaya_plugin.ground.exit_codes import ENDED_EARLY

QUIET_SECONDS, QUIET_STEPS = 600.0, 20  # without a step, of a run that trains
STARTING_SECONDS = 3600.0  # a start with compilation and a long load


def last_metrics(run_dir: Path) -> tuple[dict[str, Any], float] | None:
    """Return the last whole line of metrics.jsonl and when it was written; None: there is none."""
    file = run_dir / metrics_file.NAME
    with contextlib.suppress(OSError):
        stamp = file.stat()
        for row in metrics_file.last_rows(file):
            return row, stamp.st_mtime
    return None


@dataclass
class Now:
    """The phase of a run and the clocks of its rows, which Cluster and Account do not hold.

    last: time of the latest row. since: start of the phase. progress: time of the last step. size: number of nodes that
    train. nodes: name -> state. diagnosis, decision: the latest row.
    """

    cluster: Cluster
    last: float | None = None
    since: float | None = None
    progress: float | None = None
    phase: str = "waits for nodes"
    size: int | None = None
    world_size: int | None = None
    nodes: dict[str, str] = field(default_factory=dict)
    diagnosis: Diagnosis | None = None
    decision: Decision | None = None

    def add(self, row: Row) -> None:
        """Apply one row."""
        if row.time is None:
            return
        self.last = row.time
        match row:
            case Begin():
                self.__init__(self.cluster, row.time, row.time, size=row.nodes)
            case NodeChange():
                self.nodes[row.node] = row.state
            case AttemptStart():
                self.phase, self.since, self.world_size = "starts", row.time, row.world_size
            case Progress():
                self.progress = row.at or row.time
                self.phase = "trains" if self.phase == "starts" else self.phase
            case Symptom() if self.phase in ("trains", "starts"):
                self.since = row.time
            case Diagnosis():
                self.diagnosis = row
            case Decision():
                self.decision, self.since = row, row.time
                if row.action in ENDING:
                    self.phase = f"down, {row.action}"
                elif row.action == "done":
                    self.phase = "saves and ends"
            case End():
                self.phase, self.since = "ended", row.time


def status(
    rows: Iterable[Row], now: float, metrics: tuple[dict[str, Any], float] | None = None
) -> tuple[list[str], int, bool]:
    """Return the lines for a person, the exit code, and whether the run has ended. metrics: the last line of
    metrics.jsonl, and its time.
    """
    rows = [*rows]
    result, at = account(rows), Now(Cluster().replay(rows))
    for row in rows:
        at.add(row)
    cluster = at.cluster
    if at.last is None:
        return ["the journal is empty: the decider has not started"], 1, False
    step = cluster.resume_step if cluster.step is None else cluster.step
    if metrics is not None and at.phase in ("trains", "starts") and metrics[1] >= cluster.since:
        step, at.progress, at.phase = metrics[0]["step"], max(at.progress or 0, metrics[1]), "trains"
    trouble = _trouble(result, at, now)
    table = [
        ("state", at.phase + (f", exit code {result.code}" if result.ended else "") + _ago(at.since, now)),
        ("trouble", trouble),
        ("step", _step(cluster, step, metrics)),
        ("last progress", _ago(at.progress, now, "")),
        ("attempt", _attempt(result, at)),
        ("nodes", _nodes(at)),
        ("last failure", _failure(at.diagnosis, now)),
        ("decision", f"{at.decision.action}: {at.decision.reason}" if at.decision else ""),
        (
            "training",
            f"{percent(result.ettr)} of {duration(result.seconds)}, {result.lost_steps:,.0f} steps made again",
        ),
    ]
    return [f"{name:15}{printable(text)}" for name, text in table if text], int(bool(trouble)), result.ended


def _trouble(account: Account, at: Now, now: float) -> str:
    if account.ended:
        return "" if account.code in (0, ENDED_EARLY) else account.reason or "it ended with an error"
    if at.phase.startswith("down"):
        return "a failure has ended the attempt"
    heard, limit = max(at.last, at.progress or 0), STARTING_SECONDS
    if at.phase == "trains":
        heard, limit = at.progress or at.last, max(QUIET_SECONDS, QUIET_STEPS * at.cluster.step_seconds)
    if now - heard > limit:
        return f"no sign of it for {duration(now - heard)}: a long pause, or the supervisor is gone"
    return ""


def _ago(clock: float | None, now: float, before: str = ", since ") -> str:
    if clock is None:
        return ""
    return f"{before}{duration(max(0.0, now - clock))}" + ("" if before else " ago")


def _step(cluster: Cluster, step: int | None, metrics: tuple[dict[str, Any], float] | None) -> str:
    if step is None:
        return ""
    loss = metrics[0].get("loss") if metrics and metrics[0].get("step") == step else None
    text = f"{step:,.0f}" + (f" of {cluster.stage_name}" if cluster.stage_name else "")
    text += f", {cluster.step_seconds:.3g} s a step" if cluster.step_seconds else ""
    return text + (f", loss {loss:.4f}" if isinstance(loss, float) else "")


def _attempt(account: Account, at: Now) -> str:
    if at.world_size is None:
        return ""
    resume, number = at.cluster.resume_step, len(account.failures)
    origin = "the start" if resume is None else f"step {resume:,.0f}"
    failures = f"{number} failure{'s' * (number != 1)} so far"
    return f"{at.cluster.generation}, {at.world_size} ranks, from {origin}; {failures}"


def _nodes(at: Now) -> str:
    names = at.cluster.nodes
    joined = sorted(name for name, state in at.nodes.items() if state in (JOINED, BACK) and name not in names)
    away = [f"{name} ({state})" for name, state in at.nodes.items() if state in (LOST, OUT)]
    parts = [f"{len(joined)} of {at.size} have joined"]
    if names:
        spares = f": {' '.join(joined[:8])}" if joined else ""
        parts = [f"{len(names)} of {at.size} train", f"{len(joined)} spare{spares}"]
    if away:
        parts.append(f"away: {' '.join(away[:8])}" + (f" and {len(away) - 8} more" if len(away) > 8 else ""))
    return ", ".join(parts)


def _failure(diagnosis: Diagnosis | None, now: float) -> str:
    if diagnosis is None:
        return ""
    place = (f" on {diagnosis.node}" if diagnosis.node else "") + (
        f", rank {diagnosis.rank}" if diagnosis.rank is not None else ""
    )
    text = first_text(diagnosis)[:200]
    return f"{diagnosis.cause}{place}, {_ago(diagnosis.time, now, '')}" + (f": {text}" if text else "")
