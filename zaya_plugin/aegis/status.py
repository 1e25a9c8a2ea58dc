# SPDX-License-Identifier: Apache-2.0
"""The present state of a supervised run, from its journal and the last line of metrics.jsonl. Nothing is written and no
process is asked, so this works on any host that sees the run directory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zaya_plugin.aegis.account import ENDING, account, first_text
from zaya_plugin.aegis.attempts import Account
from zaya_plugin.aegis.evidence import parsed, printable
from zaya_plugin.aegis.journal import sound
from zaya_plugin.aegis.report import duration, percent
from zaya_plugin.ground.errors import ENDED_EARLY

QUIET_SECONDS, QUIET_STEPS = 600.0, 20  # without a step, of a run that trains
STARTING_SECONDS = 3600.0  # a start with compilation and a long load
TAIL = 65536  # bytes of metrics.jsonl


@dataclass
class Now:
    """The present state of a run, from the rows of its journal: clocks and phases, which Cluster and Account do not hold.

    last: time of the latest row. since: start of the phase. progress: time of the last step. wanted: number of nodes.
    attempt, diagnosis, decision: the latest row. nodes: name -> state.
    """

    last: float | None = None
    progress: float | None = None
    since: float | None = None
    step: float | None = None
    step_seconds: float | None = None
    stage: str | None = None
    phase: str = "waits for nodes"
    wanted: int | None = None
    attempt: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, str] = field(default_factory=dict)
    diagnosis: dict[str, Any] | None = None
    decision: dict[str, Any] | None = None

    def take(self, row: dict[str, Any]) -> None:
        """Apply one row."""
        clock, kind = row.get("time"), row["kind"]
        if clock is None:
            return
        self.last = clock
        if kind == "begin":
            self.__init__(last=clock, wanted=row.get("nodes"), since=clock)
        elif kind == "node" and isinstance(row.get("node"), str):
            self.nodes[row["node"]] = str(row.get("state"))
        elif kind == "attempt":
            self.attempt, self.step, self.phase, self.since = row, row.get("resume_step"), "starts", clock
        elif kind in ("first_step", "progress"):
            self.step, self.progress = row.get("step"), row.get("at") or clock
            self.step_seconds = row.get("step_seconds") or self.step_seconds
            self.stage = row.get("stage") or self.stage
            self.phase = "trains" if self.phase == "starts" else self.phase
        elif kind == "symptom" and self.phase in ("trains", "starts"):
            self.since = clock
        elif kind == "diagnosis":
            self.diagnosis = row
        elif kind == "decision":
            self.decision, self.since = row, clock
            if row.get("action") in ENDING:
                self.phase = f"down, {row['action']}"
            elif row.get("action") == "done":
                self.phase = "saves and ends"
        elif kind == "end":
            self.phase, self.since = "ended", clock


def last_metrics(run_dir: Path) -> tuple[dict[str, Any], float] | None:
    """Return the last whole line of metrics.jsonl and when it was written; None: there is none."""
    try:
        with open(run_dir / "metrics.jsonl", "rb") as file:
            stamp = os.fstat(file.fileno())
            file.seek(max(0, stamp.st_size - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            row = parsed(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            return row, stamp.st_mtime
    return None


def status(
    rows: Iterable[dict[str, Any]], now: float, metrics: tuple[dict[str, Any], float] | None = None
) -> tuple[list[str], int]:
    """Return the lines for a person, and the exit code."""
    rows = [sound(row) for row in rows]
    result, at = account(rows), Now()
    for row in rows:
        at.take(row)
    if at.last is None:
        return ["the journal is empty: the decision maker has not started"], 1
    if metrics is not None and at.phase in ("trains", "starts") and metrics[1] >= at.attempt["time"]:
        at.step, at.progress, at.phase = metrics[0]["step"], max(at.progress or 0, metrics[1]), "trains"
    trouble = _trouble(result, at, now)
    lines = [
        ("state", at.phase + (f", exit code {result.code}" if result.ended else "") + _ago(at.since, now)),
        ("trouble", trouble),
        ("step", _step(at, metrics)),
        ("last progress", _ago(at.progress, now, "")),
        ("attempt", _attempt(result, at)),
        ("nodes", _nodes(at)),
        ("last failure", _failure(at, now)),
        ("decision", _decision(at)),
        (
            "training",
            f"{percent(result.ettr)} of {duration(result.seconds)}, {result.lost_steps:,.0f} steps made again",
        ),
    ]
    return [f"{name:15}{printable(text)}" for name, text in lines if text], int(bool(trouble))


def _trouble(account: Account, at: Now, now: float) -> str:
    if account.ended:
        return "" if account.code in (0, ENDED_EARLY) else account.reason or "it ended with an error"
    if at.phase.startswith("down"):
        return "a failure has ended the attempt"
    heard = max(at.last, at.progress or 0)
    limit = STARTING_SECONDS
    if at.phase == "trains":
        heard, limit = at.progress or at.last, max(QUIET_SECONDS, QUIET_STEPS * (at.step_seconds or 0))
    if now - heard > limit:
        return f"nothing was heard of it for {duration(now - heard)}: a long pause, or the supervisor is gone"
    return ""


def _ago(clock: float | None, now: float, before: str = ", since ") -> str:
    if clock is None:
        return ""
    return f"{before}{duration(max(0.0, now - clock))}" + ("" if before else " ago")


def _step(at: Now, metrics: tuple[dict[str, Any], float] | None) -> str:
    if at.step is None:
        return ""
    loss = metrics[0].get("loss") if metrics and metrics[0].get("step") == at.step else None
    text = f"{at.step:,.0f}" + (f" of {at.stage}" if at.stage else "")
    text += f", {at.step_seconds:.3g} s a step" if at.step_seconds else ""
    return text + (f", loss {loss:.4f}" if isinstance(loss, float) else "")


def _attempt(account: Account, at: Now) -> str:
    if not at.attempt:
        return ""
    resume = at.attempt.get("resume_step")
    failures = f"{len(account.failures)} failures so far" if len(account.failures) != 1 else "1 failure so far"
    origin = "the start" if resume is None else f"step {resume:,.0f}"
    return f"{at.attempt.get('generation')}, {at.attempt.get('world_size')} ranks, from {origin}; {failures}"


def _nodes(at: Now) -> str:
    names = at.attempt.get("nodes")
    names = [str(name) for name in names] if isinstance(names, list) else []
    joined = [name for name, state in at.nodes.items() if state in ("joined", "back") and name not in names]
    away = [f"{name} ({state})" for name, state in at.nodes.items() if state in ("lost", "out")]
    parts = [f"{len(names)} of {at.wanted} train" if names else f"{len(joined)} of {at.wanted} are there"]
    if names:
        parts.append(f"{len(joined)} spare" + (f": {' '.join(sorted(joined)[:8])}" if joined else ""))
    if away:
        parts.append(f"away: {' '.join(away[:8])}" + (f" and {len(away) - 8} more" if len(away) > 8 else ""))
    return ", ".join(parts)


def _failure(at: Now, now: float) -> str:
    if at.diagnosis is None:
        return ""
    where = f" on {at.diagnosis['node']}" if at.diagnosis.get("node") else ""
    where += f", rank {at.diagnosis['rank']}" if at.diagnosis.get("rank") is not None else ""
    text = first_text(at.diagnosis)[:200]
    return f"{at.diagnosis.get('cause')}{where}, {_ago(at.diagnosis['time'], now, '')}" + (f": {text}" if text else "")


def _decision(at: Now) -> str:
    if at.decision is None:
        return ""
    return f"{at.decision.get('action')}: {at.decision.get('reason')}"
