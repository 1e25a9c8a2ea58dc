# SPDX-License-Identifier: Apache-2.0
"""From the rows of a journal to the account of the run: one pass that cuts the time into attempts, and one that gives
every second to training, to a failure, or to a start or an end.

Detection lasts from the time of the evidence on its node (of a hang: the last step) to the symptom's line, recovery from
there to the first step of the next attempt that makes one.

A clock that is set back adds no time. One that is set forward cannot be told from a long wait.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from zaya_plugin.aegis.attempts import END, START, TRAINING, Account, Attempt, Failure, Span, Stage
from zaya_plugin.aegis.journal import sound
from zaya_plugin.aegis.settings import is_train

ENDING = ("restart", "exchange", "shrink", "rollback", "requeue", "stop")  # decisions about a failure that ends ranks
SETTLE_SECONDS = 10.0  # symptoms of one failure arrive within this time before its diagnosis
INTERRUPTED = "interrupted"  # the cause of an attempt that has no end in the journal


def account(rows: Iterable[dict[str, Any]]) -> Account:
    """Return the account of a journal, up to its last row. Rows without what they need are left out."""
    read = _Reading()
    for row in rows:
        read.take(sound(row))
    result = read.finish()
    _spend(result, read.sessions)
    _times(result)
    return result


class _Reading:
    """The first pass: rows to attempts and failures.

    now: seconds of the account. sessions: the begin and end of each start of the command by a person.
    """

    def __init__(self) -> None:
        self.found = Account()
        self.now, self.last_clock = 0.0, None
        self.sessions: list[list[float]] = []
        self.attempt: Attempt | None = None
        self.symptoms: list[tuple[float, float, dict[str, Any]]] = []  # time, clock, evidence; since the last decision
        self.said: dict[str, Any] = {}
        self.step_seconds: list[tuple[Stage | None, float]] = []
        self.stage: Stage | None = None  # of the last step

    def take(self, row: dict[str, Any]) -> None:
        clock, kind = row.get("time"), row.get("kind")
        if clock is None:
            return
        if self.last_clock is None:
            self.found.begin = clock
        elif kind != "begin":
            self.now += max(0.0, clock - self.last_clock)
        self.last_clock = clock
        if not self.sessions and kind != "begin":
            self._on_begin(row)
        getattr(self, f"_on_{kind}", lambda row: None)(row)

    def _on_begin(self, row: dict[str, Any]) -> None:
        if self.sessions:
            self._close(interrupted=not self.found.ended)
            self.sessions[-1][1] = self.now
            self.found.pauses.append(self.now)
        self.sessions.append([self.now, self.now])
        self.found.ended, self.found.code, self.found.reason = False, None, ""
        if isinstance(row.get("command"), list):
            self.found.command = [str(word) for word in row["command"]]
        self.symptoms, self.said = [], {}

    def _on_node(self, row: dict[str, Any]) -> None:
        if row.get("state") == "out":
            self.found.nodes_out[row.get("node", "")] = row.get("reason", "")
        elif row.get("state") == "back":
            self.found.nodes_out.pop(row.get("node"), None)

    def _on_attempt(self, row: dict[str, Any]) -> None:
        self._close(interrupted=True)
        nodes = [str(node) for node in row["nodes"]] if isinstance(row.get("nodes"), list) else []
        self.attempt = Attempt(
            int(row.get("generation") or len(self.found.attempts) + 1),
            nodes,
            int(row.get("world_size") or len(nodes)),
            self.now,
            self.last_clock,
            len(self.sessions) - 1,
            row.get("resume_step"),
        )
        self.found.attempts.append(self.attempt)
        self.symptoms, self.said = [], {}

    def _on_progress(self, row: dict[str, Any]) -> None:
        step, seconds, at = (row.get(name) for name in ("step", "step_seconds", "at"))
        if step is None or self.attempt is None or self.attempt.end is not None:
            return
        points, stage = self.attempt.points, self._stage_of(row)
        begins = points and stage is not self.stage
        self.stage = stage
        if seconds:
            self.step_seconds.append((stage, seconds))
        step, after = stage.before + step, row.get("after")
        if points and step <= points[-1][1]:
            return
        time = self.now - min(max(0.0, self.last_clock - at), self.now) if at is not None else self.now
        if begins:
            origin = step - 1 if after is None else min(stage.before + after, step)
            begin = max(points[-1][0], time - (step - origin) * (seconds or 0.0))
            self.attempt.starts.append((points[-1][0], begin))
            points.append((begin, max(origin, points[-1][1])))
        elif points:
            if at is None and seconds:  # the line may be written long after the step
                time = min(time, points[-1][0] + (step - points[-1][1]) * seconds)
            time = max(time, points[-1][0])
        else:
            self.attempt.first_seen = time = max(time, self.attempt.start)
            self.attempt.before, self.attempt.origin = stage.before, None if after is None else stage.before + after
        points.append((time, step))

    _on_first_step = _on_progress

    def _stage_of(self, row: dict[str, Any]) -> Stage:
        """Return the stage of a step, which may be its first. Steps without a name are of the last stage, unless they
        count from 1 again within an attempt; those of `zaya train` never do.
        """
        points, name = self.attempt.points, row.get("stage") or ""
        done = max((one.points[-1][1] for one in self.found.attempts if one.points), default=0.0)
        if name:
            stage = next((each for each in self.found.stages if each.name == name), None)
            if stage is not None and points and stage is not self.stage and stage.before + row["step"] <= points[-1][1]:
                stage.before = done  # the one before it was made longer
        else:
            repeated = points and self.stage.before + row["step"] < points[-1][1]
            stage = None if repeated and not is_train(self.found.command or ["zaya", "train"]) else self.stage
        if stage is None:
            stage = Stage(name, done)
            self.found.stages.append(stage)
        return stage

    def _on_checkpoint(self, row: dict[str, Any]) -> None:
        if "step" in row:
            self.found.checkpoints.append((self.now, row["step"]))

    def _on_symptom(self, row: dict[str, Any]) -> None:
        if isinstance(row.get("evidence"), dict):
            self.symptoms.append((self.now, self.last_clock, sound(row["evidence"])))

    def _on_diagnosis(self, row: dict[str, Any]) -> None:
        self.said = row

    def _on_decision(self, row: dict[str, Any]) -> None:
        action, diagnosis, self.said = row.get("action", ""), self.said, {}
        cause, node, reason = diagnosis.get("cause", "unknown"), diagnosis.get("node"), row.get("reason", "")
        self.found.decisions[action] = self.found.decisions.get(action, 0) + 1
        if action == "ride":
            self.found.rides.append({"time": self.now, "cause": cause, "node": node, "reason": reason})
        if action not in ENDING or self.attempt is None or self.attempt.failure is not None:
            return
        seen = [symptom for symptom in self.symptoms if self.now - symptom[0] <= SETTLE_SECONDS][:1] or self.symptoms[
            -1:
        ]
        time, at, evidence = seen[0] if seen else (self.now, self.last_clock, {})
        text = first_text(diagnosis) or evidence.get("text", "")
        detect = max(0.0, at - evidence["time"]) if "time" in evidence else None
        failure = Failure(
            self.attempt.generation, cause, time, at, action, reason, node, diagnosis.get("rank"), text, detect
        )
        self._fail(failure)
        self.symptoms = []

    def _on_stopped(self, row: dict[str, Any]) -> None:
        if self.attempt is not None and self.attempt.end is None:
            self.attempt.end = self.now

    def _on_end(self, row: dict[str, Any]) -> None:
        self._close(interrupted=False)
        self.found.ended, self.found.reason, self.found.code = True, row.get("reason", ""), row.get("code")

    def _fail(self, failure: Failure) -> None:
        self.attempt.failure = failure
        self.found.failures.append(failure)

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
        account = self.found
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


def first_text(row: dict[str, Any]) -> str:
    """Return the text of a diagnosis' first evidence."""
    evidence = row.get("evidence")
    first = evidence[0] if isinstance(evidence, list) and evidence else None
    return str(first.get("text", "")) if isinstance(first, dict) else ""


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


def _times(account: Account) -> None:
    """Fill in how long the failures took to recover."""
    for number, one in enumerate(account.attempts):
        if (failure := one.failure) is None:
            continue
        later = [attempt for attempt in account.attempts[number + 1 :] if attempt.points]
        if later:
            failure.recover = max(0.0, later[0].first_seen - failure.time)
