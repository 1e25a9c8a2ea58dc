# SPDX-License-Identifier: Apache-2.0
"""The account of a supervised run, from its journal: attempts, failures, uses of time, and the figures made of them.

One pass cuts the time into attempts, a second one gives every second to training, to a failure, or to a start or an end.
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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from zaya_plugin.aegis.protocol import (
    BACK,
    OUT,
    AttemptStart,
    Begin,
    Checkpoint,
    Decision,
    Diagnosis,
    End,
    NodeChange,
    Progress,
    Row,
    Stopped,
    Symptom,
    row_of,
)
from zaya_plugin.aegis.settings import is_train

TRAINING, START, END = "training", "start", "after the last step"  # uses of time, as well as the failures
ENDING = ("restart", "exchange", "shrink", "rollback", "requeue", "stop")  # decisions about a failure that ends ranks
SETTLE_SECONDS = 10.0  # symptoms of one failure arrive within this time before its diagnosis
INTERRUPTED = "interrupted"  # the cause of an attempt that has no end in the journal
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
    """One start of the ranks. Times are seconds of the account, and steps are those of the run: they continue in the next
    stage.

    before: steps of earlier stages. origin: the step that the ranks reported to continue from.
    points: when a step was done, neither falling; the first one is the step that the attempt started from.
    starts: from the last step of a stage to the begin of the next one's first.
    kept: the last step that later attempts did not make again. first_seen: the time of its first step.
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

    def _of(self, use: str) -> float:
        return sum(span.end - span.begin for span in self.spans if span.use == use)

    @property
    def training(self) -> float:
        """Seconds of training that was kept."""
        return self._of(TRAINING)

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


def account(lines: Iterable[dict[str, Any]]) -> Account:
    """Return the account of a journal, up to its last row. Rows without the fields that they need are left out."""
    reading = _Reading()
    for line in lines:
        reading.add(row_of(line))
    result = reading.finish()
    _spend(result, reading.sessions)
    _add_recovery_times(result)
    return result


class _Reading:
    """The first pass: rows to attempts and failures.

    now: seconds of the account. sessions: the begin and end of each start of the command by a person.
    """

    def __init__(self) -> None:
        self.account = Account()
        self.now, self.last_clock = 0.0, None
        self.sessions: list[list[float]] = []
        self.attempt: Attempt | None = None
        self.symptoms: list[tuple[float, float, float, str]] = []  # since the last decision: time, clock, evidence's
        self.diagnosis = Diagnosis()
        self.step_seconds: list[tuple[Stage | None, float]] = []
        self.stage: Stage | None = None  # of the last step

    def add(self, row: Row) -> None:
        if row.time is None:
            return
        if self.last_clock is None:
            self.account.begin = row.time
        elif not isinstance(row, Begin):
            self.now += max(0.0, row.time - self.last_clock)
        self.last_clock = row.time
        if not self.sessions and not isinstance(row, Begin):
            self._begin(Begin())
        match row:
            case Begin():
                self._begin(row)
            case NodeChange(state=state) if state == OUT:
                self.account.nodes_out[row.node] = row.reason
            case NodeChange(state=state) if state == BACK:
                self.account.nodes_out.pop(row.node, None)
            case AttemptStart():
                self._start(row)
            case Progress():
                self._progress(row)
            case Checkpoint():
                self.account.checkpoints.append((self.now, row.step))
            case Symptom():
                self.symptoms.append((self.now, row.time, row.evidence.time, row.evidence.text))
            case Diagnosis():
                self.diagnosis = row
            case Decision():
                self._decide(row)
            case Stopped() if self.attempt is not None and self.attempt.end is None:
                self.attempt.end = self.now
            case End():
                self._close(interrupted=False)
                self.account.ended, self.account.reason, self.account.code = True, row.reason, row.code

    def _begin(self, row: Begin) -> None:
        if self.sessions:
            self._close(interrupted=not self.account.ended)
            self.sessions[-1][1] = self.now
            self.account.pauses.append(self.now)
        self.sessions.append([self.now, self.now])
        self.account.ended, self.account.code, self.account.reason = False, None, ""
        self.account.command = [str(word) for word in row.command] or self.account.command
        self.symptoms, self.diagnosis = [], Diagnosis()

    def _start(self, row: AttemptStart) -> None:
        self._close(interrupted=True)
        nodes = [str(node) for node in row.nodes]
        generation, size = row.generation or len(self.account.attempts) + 1, row.world_size or len(nodes)
        session = len(self.sessions) - 1
        self.attempt = Attempt(generation, nodes, size, self.now, self.last_clock, session, row.resume_step)
        self.account.attempts.append(self.attempt)
        self.symptoms, self.diagnosis = [], Diagnosis()

    def _progress(self, row: Progress) -> None:
        if self.attempt is None or self.attempt.end is not None:
            return
        points, stage, seconds = self.attempt.points, self._stage_of(row), row.step_seconds
        begins = points and stage is not self.stage
        self.stage = stage
        if seconds:
            self.step_seconds.append((stage, seconds))
        step = stage.before + row.step
        if points and step <= points[-1][1]:
            return
        time = self.now - min(max(0.0, self.last_clock - row.at), self.now) if row.at is not None else self.now
        if begins:
            origin = step - 1 if row.after is None else min(stage.before + row.after, step)
            begin = max(points[-1][0], time - (step - origin) * (seconds or 0.0))
            self.attempt.starts.append((points[-1][0], begin))
            points.append((begin, max(origin, points[-1][1])))
        elif points:
            if row.at is None and seconds:  # the row may be written long after the step
                time = min(time, points[-1][0] + (step - points[-1][1]) * seconds)
            time = max(time, points[-1][0])
        else:
            self.attempt.first_seen = time = max(time, self.attempt.start)
            self.attempt.before = stage.before
            self.attempt.origin = None if row.after is None else stage.before + row.after
        points.append((time, step))

    def _stage_of(self, row: Progress) -> Stage:
        """Return the stage of a step, which may be its first. Steps without a name are of the last stage, unless they
        count from 1 again within an attempt; those of `zaya train` never do.
        """
        points, name = self.attempt.points, row.stage or ""
        done = max((one.points[-1][1] for one in self.account.attempts if one.points), default=0.0)
        if name:
            stage = next((stage for stage in self.account.stages if stage.name == name), None)
            if stage is not None and points and stage is not self.stage and stage.before + row.step <= points[-1][1]:
                stage.before = done  # the one before it was made longer
        else:
            repeated = points and self.stage.before + row.step < points[-1][1]
            stage = None if repeated and not is_train(self.account.command or ["zaya", "train"]) else self.stage
        if stage is None:
            stage = Stage(name, done)
            self.account.stages.append(stage)
        return stage

    def _decide(self, row: Decision) -> None:
        action, diagnosis, self.diagnosis = row.action, self.diagnosis, Diagnosis()
        self.account.decisions[action] = self.account.decisions.get(action, 0) + 1
        if action == "ride":
            ride = {"time": self.now, "cause": diagnosis.cause, "node": diagnosis.node, "reason": row.reason}
            self.account.rides.append(ride)
        if action not in ENDING or self.attempt is None or self.attempt.failure is not None:
            return
        recent = [symptom for symptom in self.symptoms if self.now - symptom[0] <= SETTLE_SECONDS]
        time, clock, happened, text = (recent[:1] or self.symptoms[-1:] or [(self.now, self.last_clock, None, "")])[0]
        failure = Failure(self.attempt.generation, diagnosis.cause, time, clock, action, row.reason)
        failure.node, failure.rank, failure.text = diagnosis.node, diagnosis.rank, first_text(diagnosis) or text
        failure.detect = None if happened is None else max(0.0, clock - happened)
        self._fail(failure)
        self.symptoms = []

    def _fail(self, failure: Failure) -> None:
        self.attempt.failure = failure
        self.account.failures.append(failure)

    def _close(self, interrupted: bool) -> None:
        """End the attempt. interrupted: its end is not in the journal."""
        if self.attempt is None:
            return
        if interrupted and self.attempt.failure is None and self.attempt.end is None:
            self._fail(Failure(self.attempt.generation, INTERRUPTED, self.now, self.last_clock))
        if self.attempt.end is None:
            self.attempt.end = self.now
        self.attempt = None

    def finish(self) -> Account:
        account = self.account
        account.seconds = self.now
        if self.sessions:
            self.sessions[-1][1] = self.now
        for one in account.attempts:
            one.end = self.now if one.end is None else one.end
        account.step_seconds = median(seconds for _, seconds in self.step_seconds) if self.step_seconds else None
        for stage in account.stages:
            seconds = [value for of, value in self.step_seconds if of is stage]
            stage.step_seconds = median(seconds) if seconds else None
        for one in account.attempts:
            if one.points:
                _add_base(one, account.stage_at(one.points[0][1]).step_seconds or account.step_seconds or 0.0)
        return account


def first_text(diagnosis: Diagnosis) -> str:
    """Return the text of a diagnosis' first evidence."""
    return diagnosis.evidence[0].text if diagnosis.evidence else ""


def _add_base(one: Attempt, step_seconds: float) -> None:
    """Put the step that the attempt started from before its first point.

    Without a checkpoint that is the run's start, if the attempt had the time for all steps since; else it has loaded
    one of another run, and the step before the first is taken.
    """
    time, first = one.points[0]
    if one.origin is not None and one.origin < first:
        base = one.origin
    elif one.resume_step is not None and one.resume_step < first:
        base = float(one.resume_step)
    else:
        all_computed = one.resume_step is None and (first - one.before) * step_seconds <= time - one.start
        base = one.before if all_computed else first - 1
    one.points.insert(0, (max(one.start, time - (first - base) * step_seconds), base))
    one.kept = one.last_step


def _spend(account: Account, sessions: Sequence[Sequence[float]]) -> None:
    """The second pass: give every second to a use, and every step that was made again to the failure."""
    spans: list[Span] = []
    now, use, world = 0.0, START, account.attempts[0].world_size if account.attempts else 0

    def until(time: float) -> None:
        nonlocal now
        if time > now:
            spans.append(Span(now, time, use, world))
            now = time

    session, blamed = 0, None
    for one in account.attempts:
        while session < one.session:
            until(sessions[session][1])
            session, use = session + 1, START
        if use == START:
            world = one.world_size
        until(one.start)
        world = one.world_size
        if one.points:
            until(one.points[0][0])
            spans = _give_up(account, spans, one, blamed or use)
            use = TRAINING
            for last, begin in one.starts:
                until(last)
                use = START
                until(begin)
                use = TRAINING
            until(one.points[-1][0])
            use = one.failure or END
        elif one.failure is not None:
            until(one.failure.time)
            use = one.failure
        blamed = one.failure if one.points else one.failure or blamed
        until(one.end)
    while session < len(sessions):
        until(sessions[session][1])
        session, use = session + 1, START
    account.spans = spans
    for span in spans:
        if isinstance(span.use, Failure):
            span.use.seconds += span.end - span.begin
            span.use.gpu_hours += span.gpu_hours


def _give_up(account: Account, spans: list[Span], following: Attempt, use: str | Failure) -> list[Span]:
    """Return `spans` without the training that `following` makes again: it starts from an earlier step."""
    for one in account.attempts[: account.attempts.index(following)]:
        if not one.points or one.kept <= following.base:
            continue
        kept = max(one.base, following.base)
        begin, end = one.time_at(kept), one.time_at(one.kept)
        if isinstance(use, Failure):
            use.lost_steps += one.kept - kept
        one.kept = kept
        cut: list[Span] = []
        for span in spans:
            left, right = max(span.begin, begin), min(span.end, end)
            if span.use != TRAINING or left >= right:
                cut.append(span)
                continue
            parts = ((span.begin, left, TRAINING), (left, right, use), (right, span.end, TRAINING))
            cut += [Span(a, b, share, span.world_size) for a, b, share in parts if b > a]
        spans = cut
    return spans


def _add_recovery_times(account: Account) -> None:
    """Fill in how long the failures took to recover."""
    for number, one in enumerate(account.attempts):
        if (failure := one.failure) is None:
            continue
        later = [attempt for attempt in account.attempts[number + 1 :] if attempt.points]
        if later:
            failure.recover = max(0.0, later[0].first_seen - failure.time)
