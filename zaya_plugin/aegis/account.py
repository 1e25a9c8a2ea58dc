# SPDX-License-Identifier: Apache-2.0
"""What a supervised run's time was spent on, from its journal alone.

Effective training time is the share of the wall time in which the run made steps that it had not made before (ByteRobust,
arXiv 2509.16293, calls it ETTR). A failure costs the time from the moment it happened until the step after the last one
made before it is done again; the start costs the time to the first step. Goodput is stricter: the new steps at the
median time of a step, over the wall time, so that slow steps count too.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zaya_plugin.aegis.journal import read
from zaya_plugin.errors import mistake

GOES_ON = ("ride", "watch")  # decisions after which the ranks run on


@dataclass
class Failure:
    """One failure. Times in seconds since 1970; None: not yet.

    happened: when the cause happened. detected: when the decision maker saw it. restarted: the next attempt's first step.
    regained: when the steps made before the failure were made again. lost_steps: those that had to be made again.
    """

    happened: float
    detected: float
    cause: str = "unknown"
    node: str | None = None
    rank: int | None = None
    action: str = ""
    reason: str = ""
    restarted: float | None = None
    regained: float | None = None
    lost_steps: int = 0


@dataclass
class Account:
    """A run so far. gpus: ranks of the first attempt; end: of the run, or the time of asking."""

    command: str = ""
    begin: float = 0.0
    end: float = 0.0
    code: int | None = None
    reason: str = ""
    gpus: int = 0
    step: int = 0
    step_seconds: float = 0.0
    start_seconds: float = 0.0
    attempts: list[dict[str, Any]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    ridden_out: int = 0
    checkpoints: list[tuple[float, int]] = field(default_factory=list)
    nodes: dict[str, str] = field(default_factory=dict)
    first_step: int | None = None

    @property
    def wall(self) -> float:
        """Seconds from the begin to the end."""
        return max(0.0, self.end - self.begin)

    def cost(self, failure: Failure) -> float:
        """Return the seconds in which no new step was made because of a failure."""
        return max(0.0, (failure.regained or self.end) - failure.happened)

    @property
    def effective(self) -> float:
        """Effective training time, 0 to 1."""
        if not self.wall or self.first_step is None:
            return 0.0
        return max(0.0, 1 - (self.start_seconds + sum(map(self.cost, self.failures))) / self.wall)

    @property
    def goodput(self) -> float:
        """New steps at the median time of a step, over the wall time; 0 to about 1."""
        new = 0 if self.first_step is None else self.step - self.first_step + 1
        return new * self.step_seconds / self.wall if self.wall else 0.0

    def lost_hours(self) -> dict[str, float]:
        """Return GPU hours in which no new step was made, by cause, the largest first."""
        lost: dict[str, float] = {"start": self.start_seconds}
        for failure in self.failures:
            lost[failure.cause] = lost.get(failure.cause, 0.0) + self.cost(failure)
        hours = {cause: seconds * self.gpus / 3600 for cause, seconds in lost.items()}
        return dict(sorted(hours.items(), key=lambda item: -item[1]))

    def mean_seconds(self) -> tuple[float | None, float | None]:
        """Return the mean times to detect a failure and, from then on, to make a new step; None without failures."""
        detect = [failure.detected - failure.happened for failure in self.failures]
        recover = [failure.regained - failure.detected for failure in self.failures if failure.regained is not None]
        return (statistics.fmean(detect) if detect else None, statistics.fmean(recover) if recover else None)


def journal_of(directory: str | Path) -> Path:
    """Return the journal in a run's directory, or in its aegis folder. Raises ValueError if there is none."""
    for path in (Path(directory) / "journal.jsonl", Path(directory) / "aegis" / "journal.jsonl"):
        if path.is_file():
            return path
    raise mistake(
        "DIR", directory, problem="holds no journal.jsonl", allowed="the run_dir of a run under `zaya aegis run`"
    )


def account_of(directory: str | Path, now: float | None = None) -> Account:
    """Return the account of the run in `directory`; see `account`."""
    return account(read(journal_of(directory)), now)


def account(rows: Iterable[dict[str, Any]], now: float | None = None) -> Account:
    """Return what the rows of a journal add up to. now: the end of a run that goes on; default: the present time."""
    found, seen, open_failures, seconds = Account(), None, [], []
    for row in rows:
        kind, at = row["kind"], row["time"]
        if kind == "begin" and not found.begin:
            found.begin, found.command = at, _words(row.get("command"))
        elif kind == "node":
            found.nodes[row["node"]] = row["state"]
        elif kind == "attempt":
            found.attempts.append({"begin": at, "first": None, "end": None, **row})
            found.gpus = found.gpus or row["world_size"]
        elif kind == "first_step":
            if found.attempts:
                found.attempts[-1]["first"] = at
            if found.first_step is None:
                found.first_step, found.start_seconds = row["step"], at - found.begin
            for failure in open_failures:
                failure.restarted = failure.regained = at
                failure.lost_steps = max(0, found.step - row["step"] + 1)
            if found.step >= row["step"] and open_failures:  # steps are made again until a new one is
                expected = at + (found.step - row["step"] + 1) * (statistics.median(seconds) if seconds else 0.0)
                for failure in open_failures:
                    failure.regained = expected
            open_failures = []
            found.step = max(found.step, row["step"])
        elif kind == "progress":
            found.step = max(found.step, row["step"])
            if row.get("step_seconds"):
                seconds.append(row["step_seconds"])
        elif kind == "checkpoint":
            found.checkpoints.append((at, row["step"]))
        elif kind == "symptom" and seen is None:
            happened = (row.get("evidence") or {}).get("time", at)
            seen = Failure(min(happened, at), at)
            found.step = max(found.step, (row.get("evidence") or {}).get("values", {}).get("step") or 0)
        elif kind == "diagnosis":
            seen = seen or Failure(min(row.get("first") or at, at), at)
            seen.cause, seen.node, seen.rank = row["cause"], row.get("node"), row.get("rank")
        elif kind == "decision":
            if row["action"] in GOES_ON:
                found.ridden_out += row["action"] == "ride"
            elif seen is not None and row["action"] != "done":
                seen.action, seen.reason = row["action"], row.get("reason") or ""
                found.failures.append(seen)
                open_failures.append(seen)
            seen = None
        elif kind == "stopped" and found.attempts:
            found.attempts[-1]["end"] = at
        elif kind == "end":
            found.end, found.code, found.reason = at, row["code"], row.get("reason") or ""
    if found.code is None:
        found.end = max(time.time() if now is None else now, found.begin)
    found.step_seconds = statistics.median(seconds) if seconds else 0.0
    for failure in found.failures:
        if failure.regained is not None:
            failure.regained = min(failure.regained, max(found.end, failure.restarted))
    return found


def figures(found: Account) -> list[tuple[str, str]]:
    """Return name and value of the figures at the top of the report."""
    detect, recover = found.mean_seconds()
    how = "running" if found.code is None else f"ended with exit code {found.code}: {found.reason}"
    return [
        ("command", found.command),
        ("state", how),
        ("wall time", length(found.wall)),
        ("last step", f"{found.step:,}"),
        ("effective training time", f"{100 * found.effective:.2f} %"),
        ("goodput", f"{100 * found.goodput:.2f} %"),
        ("attempts", f"{len(found.attempts)}, of {found.gpus} ranks at first"),
        ("failures", f"{len(found.failures)}; {found.ridden_out} more were ridden out"),
        ("mean time to detect", "-" if detect is None else length(detect)),
        ("mean time to recover", "-" if recover is None else length(recover)),
    ]


def length(seconds: float) -> str:
    """Return a time such as 0.4 s, 2 min 5 s or 3 h 20 min."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours:,} h {minutes} min"


def _words(command: object) -> str:
    return " ".join(map(str, command)) if isinstance(command, (list, tuple)) else str(command or "")
