# SPDX-License-Identifier: Apache-2.0
"""The state of a supervised run, from the rows of its journal."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from zaya_plugin.aegis.protocol import (
    BACK,
    OUT,
    AttemptStart,
    Begin,
    Checkpoint,
    Decision,
    Diagnosis,
    End,
    FirstStep,
    NodeChange,
    Progress,
    Row,
)

LONG_ATTEMPT_SECONDS = 1800.0  # of another program, after which failures before do not count


@dataclass(frozen=True)
class Failure:
    """A diagnosis upon which ranks were ended or a link was waited for.

    step: the last step of the attempt, None: it made none. best: stage and last step that the run has ever made.
    seconds: since the attempt's start.
    """

    time: float
    cause: str
    node: str | None
    fingerprint: str
    step: int | None
    best: tuple[int, int]
    seconds: float = 0.0


@dataclass
class Cluster:
    """The state of a run as its journal has it: what a decision depends on. The decider applies each row that it writes
    and, after its own crash, the rows of the file.

    sizes: possible numbers of nodes (the largest first). group: nodes that hold one copy of the model.
    restarts: failures in a row without a new step after which the run stops.
    nodes: of the attempt, in the order of their ranks. spares: those that have joined and wait, the best first.
    trained: whether an attempt has started before, so that the next one continues. since: the start of the attempt.
    out: nodes that the run uses no more, and why.
    step: the last step of this attempt; first_step: the first one; best: the last one ever; checkpoints: their steps.
    stages: whether steps may count from 1 again, as in a curriculum; stage: how often they have; stage_name: of the
    last one.
    skips: first and last steps whose data are left out, by roll backs.
    pending: the decision that was not carried out yet. asked: the run was asked to end.
    """

    sizes: tuple[int, ...] = (1,)
    group: int = 1
    restarts: int = 10
    requeue: bool = False
    stages: bool = False
    stage: int = 0
    stage_name: str | None = None
    begun: bool = False
    ended: bool = False
    command: list[str] = field(default_factory=list)
    generation: int = 0
    trained: bool = False
    since: float = 0.0
    running: bool = False
    nodes: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    used: set[str] = field(default_factory=set)
    out: dict[str, str] = field(default_factory=dict)
    resume_step: int | None = None
    first_step: int | None = None
    step: int | None = None
    best: int = 0
    step_seconds: float = 0.0
    checkpoints: list[int] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    rides: list[tuple[float, str]] = field(default_factory=list)
    rollbacks: int = 0
    turns: int = 0
    skips: list[tuple[int, int]] = field(default_factory=list)
    pending: Decision | None = None
    asked: bool = False
    _diagnosis: Diagnosis | None = None

    def replay(self, rows: Iterable[Row]) -> Cluster:
        """Apply the rows of a journal, and return this."""
        for row in rows:
            before = dict(self.__dict__)
            try:
                self.apply(row)
            except (LookupError, TypeError, ValueError, AttributeError):  # damaged, or of another version
                self.__dict__ = before
        return self

    def apply(self, row: Row) -> None:
        """Apply one row of the journal."""
        match row:
            case Begin():
                self._begin(row)
            case End():
                self.ended, self.running, self.pending = True, False, None
            case NodeChange(state=state) if state == OUT:
                self.out[row.node] = row.reason
            case NodeChange(state=state) if state == BACK:
                self.out.pop(row.node, None)
            case AttemptStart():
                self.generation, self.since, self.nodes = int(row.generation), float(row.time), tuple(row.nodes)
                self.resume_step, self.first_step, self.step = row.resume_step, None, None
                self.pending = self._diagnosis = None
                self.trained = self.running = True
            case Progress():
                if isinstance(row, FirstStep):
                    self.first_step = row.step
                    self.used |= set(self.nodes)
                if self.begins_stage(row.stage, row.step):
                    self.stage, self.best = self.stage + 1, 0
                self.stage_name = row.stage or self.stage_name
                self.step, self.best = row.step, max(self.best, row.step)
                self.step_seconds = row.step_seconds or self.step_seconds
            case Checkpoint():
                self.checkpoints = sorted({*self.checkpoints, row.step})
            case Diagnosis():
                self._diagnosis = row
            case Decision():
                diagnosis, self._diagnosis = self._diagnosis, None
                if row.action == "ride" and diagnosis is not None:
                    self.rides.append((float(row.time), str(diagnosis.node)))
                elif row.action != "watch" and diagnosis is not None:
                    self._fail(diagnosis, row)

    def _begin(self, row: Begin) -> None:
        # A person has started the command again: earlier failures, and nodes that were taken out, do not count.
        fresh = Cluster(self.sizes, self.group, self.restarts, self.requeue, self.stages)
        fresh.generation, fresh.checkpoints, fresh.best = self.generation, self.checkpoints, self.best
        fresh.trained = self.best > 0
        fresh.skips = self.skips  # steps that were left out stay out, or the losses change
        fresh.stage_name, fresh.begun, fresh.command = self.stage_name, True, row.command
        self.__dict__.update(fresh.__dict__)

    def _fail(self, diagnosis: Diagnosis, row: Decision) -> None:
        best, seconds = (self.stage, self.best), row.time - self.since
        failure = Failure(row.time, diagnosis.cause, diagnosis.node, diagnosis.fingerprint, self.step, best, seconds)
        # Collections are replaced, not changed, so that `replay` can take a row back that is damaged.
        self.failures = [*self.failures, failure]
        self.pending, self.running = row, False
        self.out = self.out | dict.fromkeys(row.nodes_out, diagnosis.cause)
        self.turns += diagnosis.cause == "rerun_other_gpu"
        if row.skip:
            first, last = map(int, row.skip)
            self.skips = [*self.skips, *({(first, last)} - {*self.skips})]
        if row.action == "rollback":
            self.rollbacks += 1
            if row.to_step is not None:
                self.checkpoints = [step for step in self.checkpoints if step <= row.to_step]

    @property
    def failures_without_progress(self) -> list[Failure]:
        """The failures since the last new step of the run, the latest last."""
        failures = [failure for failure in self.failures if failure.best >= (self.stage, self.best)]
        # The steps of another program may be those of its next stage, or be unknown.
        long_attempts = (
            number
            for number, failure in enumerate(failures)
            if failure.seconds > LONG_ATTEMPT_SECONDS and (self.stages or failure.step is None)
        )
        return failures[max(long_attempts, default=0) :]

    def node_of(self, rank: int, ranks_per_node: int) -> str:
        """Return the node of a rank, "" for one that the attempt should not have."""
        position = rank // ranks_per_node
        return self.nodes[position] if 0 <= position < len(self.nodes) else ""

    def begins_stage(self, name: str | None, step: int) -> bool:
        """Whether a step is of a stage after the last one: of another name or, where names are unknown, with steps that
        count from 1 again within an attempt.
        """
        if name and self.stage_name:
            return self.stages and name != self.stage_name
        return self.stages and not name and self.step is not None and 0 < step < self.step

    def before(self, step: int | None) -> int | None:
        """Return the newest checkpoint before `step`; None: the start, or the checkpoints are not known."""
        return max((checkpoint for checkpoint in self.checkpoints if step is None or checkpoint < step), default=None)
