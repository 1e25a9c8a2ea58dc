# SPDX-License-Identifier: Apache-2.0
"""Make the account of a supervised run from its journal. One pass cuts the time into attempts, a second one gives
every second to training, to a failure, or to a start or an end.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median

from zaya_plugin.aegis.account import END, START, TRAINING, Account, Attempt, Failure, Span, Stage
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
)
from zaya_plugin.aegis.settings import is_train

ENDING = ("restart", "exchange", "shrink", "rollback", "requeue", "stop")  # decisions about a failure that ends ranks
SETTLE_SECONDS = 10.0  # symptoms of one failure arrive within this time before its diagnosis
INTERRUPTED = "interrupted"  # the cause of an attempt that has no end in the journal


def account(rows: Iterable[Row]) -> Account:
    """Return the account of a journal, up to its last row. Rows without the fields that they need are left out."""
    reading = _Reading()
    for row in rows:
        reading.add(row)
    result = reading.finish()
    _spend(result)
    _add_recovery_times(result)
    return result


class _Reading:
    """The first pass: rows to attempts and failures. now: seconds of the account."""

    def __init__(self) -> None:
        self.account = Account()
        self.now, self.last_clock = 0.0, None
        self.attempt: Attempt | None = None
        self.symptoms: list[tuple[float, float, float, str]] = []  # since the last decision: time, clock, evidence's
        self.diagnosis = Diagnosis()
        self.step_seconds: list[tuple[Stage | None, float]] = []
        self.stage: Stage | None = None  # of the last step

    def add(self, row: Row) -> None:
        if row.time is None:
            return
        is_first = self.last_clock is None
        if is_first:
            self.account.begin = row.time
        elif not isinstance(row, Begin):
            self.now += max(0.0, row.time - self.last_clock)
        self.last_clock = row.time
        match row:
            case Begin():
                if not is_first:
                    self._begin_session()
                self.account.command = [str(word) for word in row.command] or self.account.command
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

    def _begin_session(self) -> None:
        """Begin another session: a person has started the command again."""
        self._close(interrupted=not self.account.ended)
        self.account.pauses.append(self.now)
        self.account.ended, self.account.code, self.account.reason = False, None, ""
        self.symptoms, self.diagnosis = [], Diagnosis()

    def _start(self, row: AttemptStart) -> None:
        self._close(interrupted=True)
        nodes = [str(node) for node in row.nodes]
        generation, size = row.generation or len(self.account.attempts) + 1, row.world_size or len(nodes)
        session = len(self.account.pauses)
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
        failure = Failure(
            generation=self.attempt.generation,
            cause=diagnosis.cause,
            time=time,
            clock=clock,
            action=action,
            reason=row.reason,
            node=diagnosis.node,
            rank=diagnosis.rank,
            text=first_text(diagnosis) or text,
            detect=None if happened is None else max(0.0, clock - happened),
        )
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
        self._close(interrupted=False)
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


def _spend(account: Account) -> None:
    """The second pass: give every second to a use, and every step that was made again to the failure."""
    spans: list[Span] = []
    now, use, world = 0.0, START, account.attempts[0].world_size if account.attempts else 0

    def until(time: float) -> None:
        nonlocal now
        if time > now:
            spans.append(Span(now, time, use, world))
            now = time

    session_ends = [*account.pauses, account.seconds]
    session, blamed = 0, None
    for one in account.attempts:
        while session < one.session:
            until(session_ends[session])
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
    for end in session_ends[session:]:
        until(end)
        use = START
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
    """Fill in how long the failures took to recover: up to the first step of the next attempt that makes one."""
    next_step = None
    for one in reversed(account.attempts):
        if one.failure is not None and next_step is not None:
            one.failure.recover = max(0.0, next_step - one.failure.time)
        if one.first_seen is not None:
            next_step = one.first_seen
