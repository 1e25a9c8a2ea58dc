# SPDX-License-Identifier: Apache-2.0
"""The account of a supervised run, from its journal: attempts, failures, uses of time, and the figures made of them.

Figures, all over the time in which the run was supervised (the pause between an end and a later start by a person is
left out):

    ETTR    = seconds of training that was kept / seconds                       (effective training time ratio)
    goodput = steps that were kept x median seconds of a step (of its stage) / seconds
    uptime  = seconds in which ranks were running / seconds

ETTR is ByteRobust's (arXiv 2509.16293): productive time over wall-clock time; detection, restart, loading and steps
that are made again are not productive. Pauses for validation and saving count as training. Goodput is MegaScale's
effective rate (NSDI 2024: iterations x time of an iteration / total time) of the steps that were kept, as Google's
ML goodput counts "productive, preserved" progress: pauses and slow steps lower it too.

Detection lasts from the time of the evidence on its node (of a hang: the last step) to the symptom's row, recovery from
there to the first step of the next attempt that makes one. A clock that is set back adds no time. One that is set
forward cannot be distinguished from a long wait.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

TRAINING, START, END = "training", "start", "after the last step"  # uses of time, as well as the failures
HOUR = 3600.0


@dataclass
class Failure:
    """A failure that ended an attempt.

    time: of the symptom, in seconds of the account. clock: the same since 1970.
    action: the decision; "" if the journal has none.
    detect, recover: seconds, None: not known or not yet.
    lost_steps: made and not kept. seconds, gpu_hours: from the last step that was kept to the next attempt's first.
    """

    generation: int
    cause: str
    time: float
    clock: float
    action: str = ""
    reason: str = ""
    node: str | None = None
    rank: int | None = None
    text: str = ""
    detect: float | None = None
    recover: float | None = None
    lost_steps: float = 0.0
    seconds: float = 0.0
    gpu_hours: float = 0.0


@dataclass
class Stage:
    """Steps that are counted from 1: of the whole run, or of one stage of a curriculum.

    name: "" if unknown. before: steps of the run before its first. step_seconds: the median of the journal.
    """

    name: str
    before: float
    step_seconds: float | None = None


@dataclass
class Attempt:
    """One start of the ranks. Times are seconds of the account, and steps are those of the run: they continue in the
    next stage.

    before: steps of earlier stages. origin: the step that the ranks reported to continue from.
    points: when a step was done, neither falling; the first one is the step that the attempt started from.
    starts: from the last step of a stage to the begin of the next one's first.
    kept: the last step that later attempts did not make again. first_seen: the time of its first step.
    session: how often a person had started the run again before.
    """

    generation: int
    nodes: list[str]
    world_size: int
    start: float
    clock: float
    session: int
    resume_step: int | None = None
    end: float | None = None
    before: float = 0.0
    origin: float | None = None
    starts: list[tuple[float, float]] = field(default_factory=list)
    points: list[tuple[float, float]] = field(default_factory=list)
    first_seen: float | None = None
    kept: float = 0.0
    failure: Failure | None = None

    @property
    def base(self) -> float | None:
        """The step that it started from; None if it made no step."""
        return self.points[0][1] if self.points else None

    @property
    def last_step(self) -> float | None:
        return self.points[-1][1] if self.points else None

    def time_at(self, step: float) -> float:
        """Return when `step` was done, between two points by a straight line."""
        before = self.points[0]
        for point in self.points:
            if point[1] >= step:
                share = (step - before[1]) / (point[1] - before[1]) if point[1] > before[1] else 0.0
                return before[0] + share * (point[0] - before[0])
            before = point
        return before[0]


@dataclass(frozen=True)
class Span:
    """Time and what it was used for: TRAINING, START, END, or the failure that it was lost to."""

    begin: float
    end: float
    use: str | Failure
    world_size: int

    @property
    def gpu_hours(self) -> float:
        return (self.end - self.begin) * self.world_size / HOUR


@dataclass
class Account:
    """The account of a journal. seconds: supervised so far. spans: all of them, without a gap.

    rides: decisions to wait. decisions: action -> how many. pauses: when a person has started the run again.
    step_seconds: the median of the journal. stages: in their order, with their own medians.
    checkpoints: (time, step).
    """

    begin: float | None = None  # since 1970
    seconds: float = 0.0
    ended: bool = False
    code: int | None = None
    reason: str = ""
    command: list[str] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    rides: list[dict[str, Any]] = field(default_factory=list)
    decisions: dict[str, int] = field(default_factory=dict)
    checkpoints: list[tuple[float, int]] = field(default_factory=list)
    nodes_out: dict[str, str] = field(default_factory=dict)
    pauses: list[float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    step_seconds: float | None = None
    stages: list[Stage] = field(default_factory=list)

    @property
    def training(self) -> float:
        """Seconds of training that was kept."""
        return sum(span.end - span.begin for span in self.spans if span.use == TRAINING)

    @property
    def up(self) -> float:
        """Seconds in which ranks were running."""
        return sum(one.end - one.start for one in self.attempts)

    @property
    def ettr(self) -> float | None:
        return self.training / self.seconds if self.seconds else None

    @property
    def uptime(self) -> float | None:
        return self.up / self.seconds if self.seconds else None

    @property
    def kept_steps(self) -> float:
        return sum(one.kept - one.base for one in self.attempts if one.points)

    @property
    def goodput(self) -> float | None:
        if not self.seconds or self.step_seconds is None:
            return None
        kept = sum(self.kept_in(stage) * (stage.step_seconds or self.step_seconds) for stage in self.stages)
        return kept / self.seconds

    def kept_in(self, stage: Stage) -> float:
        """Return the steps of a stage that were kept."""
        end = min((other.before for other in self.stages if other.before > stage.before), default=float("inf"))
        return sum(max(0.0, min(one.kept, end) - max(one.base, stage.before)) for one in self.attempts if one.points)

    def stage_at(self, step: float) -> Stage:
        """Return the stage of a step of the run."""
        return max(
            (stage for stage in self.stages if stage.before < step),
            key=lambda stage: stage.before,
            default=self.stages[0],
        )

    @property
    def restarts(self) -> int:
        """Attempts that followed another one."""
        return max(0, len(self.attempts) - 1)

    @property
    def gpu_hours(self) -> float:
        return sum(span.gpu_hours for span in self.spans)

    @property
    def lost_steps(self) -> float:
        return sum(one.lost_steps for one in self.failures)

    def mean(self, name: str) -> float | None:
        """Return the mean of "detect" or "recover" over the failures of which it is known."""
        known = [value for one in self.failures if (value := getattr(one, name)) is not None]
        return fmean(known) if known else None

    def by_cause(self) -> list[dict[str, Any]]:
        """Return one row a cause with its failures, steps, seconds and GPU hours lost, the costliest first."""
        causes: dict[str, dict[str, Any]] = {}
        for one in self.failures:
            row = causes.setdefault(
                one.cause, {"cause": one.cause, "failures": 0, "lost_steps": 0.0, "seconds": 0.0, "gpu_hours": 0.0}
            )
            row["failures"] += 1
            for name in ("lost_steps", "seconds", "gpu_hours"):
                row[name] += getattr(one, name)
        return sorted(causes.values(), key=lambda row: (-row["gpu_hours"], -row["seconds"], row["cause"]))
