# SPDX-License-Identifier: Apache-2.0
"""The decision about a failure: one function of its diagnosis, of the rules, and of the run's history in the journal.

The run stops only when a restart cannot help: for a user's mistake, for the same cause three times without a new step,
and after too many failures without one. To stop wrongly costs all nodes until a person reads it; to restart once too
often costs minutes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from zaya_plugin.aegis.diagnose.rules import Rule, Rules
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
    row_of,
)

SAME_FAILURES = 3  # of one cause without a new step, upon which the run stops
LINK_SECONDS = 300.0  # two failures of a node's links within this time: exchange it
REPEAT_SECONDS = 86400.0  # a second failure of this kind on one node within a day: exchange it
DELAYS = (0.0, 0.0, 5.0, 10.0, 20.0, 40.0, 60.0)  # seconds before a start, by failures without a new step
LONG_ATTEMPT_SECONDS = 1800.0  # of another program, after which failures before do not count
ENDED_BY_REQUEST = "ended_early"
UNKNOWN_RULE = Rule("unknown", (), "watch", "high", "weak", "restart", "")


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

    def replay(self, lines: Iterable[dict[str, Any]]) -> Cluster:
        """Apply the lines of a journal, and return this."""
        for line in lines:
            before = dict(self.__dict__)
            try:
                self.apply(row_of(line))
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


def decide(diagnosis: Diagnosis, cluster: Cluster, rules: Rules, alive: bool = False) -> Decision:
    """Return what is done about a diagnosis. alive: whether all ranks run."""
    cause, node = diagnosis.cause, diagnosis.node
    rule = rules.get(cause) or UNKNOWN_RULE
    if cause == ENDED_BY_REQUEST and cluster.asked:
        return Decision("done", "The run was asked to end, and has saved")
    if alive and "watch" in (rule.role, rule.action):
        return Decision("watch", f"{cause} ends no run")
    flaps = rule.affects == "link" and _flaps(diagnosis, cluster, rules)
    if alive and rule.action == "ride":
        if flaps and cluster.spares:
            return _exchange(diagnosis, cluster, f"a link of {node} was down twice within {LINK_SECONDS:.0f} s")
        return Decision("ride", f"{cause} may end by itself within {rule.ride:.0f} s", delay=rule.ride)
    same = 1 + sum(failure.fingerprint == diagnosis.fingerprint for failure in cluster.failures_without_progress)
    if stop := _stop(diagnosis, cluster, rule, same):
        return stop
    if agent_is_back(diagnosis):
        return _restart(cluster, f"the agent of {node} was killed and is back")
    if rule.affects == "node":
        return _exchange(diagnosis, cluster, f"{cause} on {node}")
    if cause == "user_error":  # of a node that is new to a command that has trained elsewhere
        return _exchange(diagnosis, cluster, f"the command has trained before, and fails on the new node {node}")
    if cause == "rerun_other_gpu" and not cluster.spares:
        places = "nodes change places" if len(cluster.nodes) > 1 else "ranks change devices"
        return Decision("restart", f"Megatron asks for another GPU: {places}", delay=_delay(cluster))
    if cause == "rerun_persistent":
        return _exchange_suspect(diagnosis, cluster)
    if rule.action == "exchange":
        if diagnosis.confidence != "weak" or _repeats(diagnosis, cluster):
            return _exchange(diagnosis, cluster, f"{cause} on {node} ({diagnosis.confidence})")
        return _restart(cluster, f"{cause} on {node} is weak evidence, and the first")
    if rule.action == "rollback":
        return _roll_back(diagnosis, cluster, f"{cause}: the last checkpoint may hold the damage")
    if flaps or rule.affects == "link" and cluster.spares:
        return _exchange(diagnosis, cluster, f"a link of {node} was down for too long")
    if cause == "hang" and _repeats(diagnosis, cluster):
        return _exchange_group(diagnosis, cluster)
    if rule.repeats == "node" and _repeats(diagnosis, cluster):
        return _exchange(diagnosis, cluster, f"{cause} on {node} for the second time within a day")
    if same > 1 and rule.affects == "state" and _same_step(cluster):
        return _roll_back(diagnosis, cluster, f"{cause} at step {cluster.step} for the second time")
    return _restart(cluster, f"{cause}" + (f" on {node}" if node else ""))


def agent_is_back(diagnosis: Diagnosis) -> bool:
    """Whether a diagnosis is of an agent that was killed and has started again, on a node that can be used."""
    evidence = diagnosis.evidence
    return diagnosis.cause == "agent_lost" and bool(evidence) and bool(evidence[0].values.get("back"))


def _stop(diagnosis: Diagnosis, cluster: Cluster, rule: Rule, same: int) -> Decision | None:
    cause, failures = diagnosis.cause, len(cluster.failures_without_progress) + 1
    is_new_node = bool(diagnosis.node and cluster.used) and diagnosis.node not in cluster.used
    if cause == "user_error" and rule.action == "stop" and is_new_node and cluster.first_step is None:
        return None
    new_step = f"a step after {cluster.best}" if cluster.best else "any step"
    reasons = (
        (rule.action == "stop", f"{cause}: a restart does not help"),
        (
            rule.severity == "user" and cluster.step is None,
            f"{cause} before the first step of the attempt: the settings are too large",
        ),
        (rule.severity == "user" and same > 1, f"{cause} for the second time without a new step"),
        (
            cause == "rerun_application" and cluster.rollbacks,
            "the result was wrong again after a roll back: software or data, not a GPU",
        ),
        (
            same >= SAME_FAILURES and rule.severity != "policy",
            f"{diagnosis.fingerprint}: {same} times without {new_step}",
        ),
        (failures > cluster.restarts, f"{failures} failures without a new step (--restarts {cluster.restarts})"),
    )
    return next((Decision("stop", reason) for applies, reason in reasons if applies), None)


def _restart(cluster: Cluster, why: str) -> Decision:
    return Decision("restart", f"{why}: restart in place", delay=_delay(cluster))


def _delay(cluster: Cluster) -> float:
    return DELAYS[min(len(cluster.failures_without_progress), len(DELAYS) - 1)]


def _exchange(diagnosis: Diagnosis, cluster: Cluster, why: str, nodes: tuple[str, ...] = ()) -> Decision:
    """Leave out `nodes` (the diagnosis's): for spares, with fewer nodes, in another job, or else not at all."""
    nodes = nodes or ((diagnosis.node,) if diagnosis.node in cluster.nodes else ())
    if not nodes:
        return _restart(cluster, f"{why}, on no node of the attempt")
    left = len(cluster.nodes) - len(nodes) + len(cluster.spares)
    size = next((size for size in cluster.sizes if size <= left), 0)
    if size >= len(cluster.nodes):
        return Decision("exchange", f"{why}: exchanged for a spare", nodes, _delay(cluster))
    if size:
        return Decision("shrink", f"{why}: no spare is left, {size} nodes train on", nodes, _delay(cluster))
    if cluster.requeue:
        return Decision("requeue", f"{why}: {left} nodes are left, too few; SLURM starts the job again", nodes)
    return _restart(cluster, f"{why}: no other node is available")


def _exchange_suspect(diagnosis: Diagnosis, cluster: Cluster) -> Decision:
    """Megatron's verdict comes from the rank that repeated the step well: the node that asked for it is broken."""
    suspects = [failure.node for failure in cluster.failures if failure.cause == "rerun_other_gpu" and failure.node]
    if not suspects:
        return _restart(cluster, f"{diagnosis.cause}, and it is not known on which node the step was wrong")
    why = f"{diagnosis.cause}: another GPU than that of {suspects[-1]} computes the right result"
    if suspects[-1] in cluster.nodes:
        return _exchange(diagnosis, cluster, why, (suspects[-1],))
    return Decision("restart", f"{why}; it is out, and the others train on", (suspects[-1],), _delay(cluster))


def _exchange_group(diagnosis: Diagnosis, cluster: Cluster) -> Decision:
    """A hang that came again: the node of the rank that did not arrive, with all that share its copy of the model."""
    if diagnosis.node not in cluster.nodes:
        return _restart(cluster, "the ranks hang again, and none of them can be named")
    first = cluster.nodes.index(diagnosis.node) // cluster.group * cluster.group
    group = cluster.nodes[first : first + cluster.group]
    if diagnosis.confidence != "sure" and 1 < len(group) <= len(cluster.spares):
        return _exchange(
            diagnosis, cluster, f"a hang of rank {diagnosis.rank} again, not clear which node of its group", group
        )
    return _exchange(diagnosis, cluster, f"rank {diagnosis.rank} on {diagnosis.node} hangs again")


def _roll_back(diagnosis: Diagnosis, cluster: Cluster, why: str) -> Decision:
    values = diagnosis.evidence[0].values if diagnosis.evidence else {}
    begin = values.get("first_step", values.get("step"))
    bad = begin if isinstance(begin, int) else None
    newest = cluster.before(None)
    # The evidence says from which step on a checkpoint may be spoiled; it was wrong if the same failure comes again.
    repeated = any(failure.fingerprint == diagnosis.fingerprint for failure in cluster.failures_without_progress)
    to_step = cluster.before(newest if bad is None or repeated and newest is not None and newest < bad else bad)
    skip = values.get("skip")
    skip = (int(skip[0]), int(skip[1])) if isinstance(skip, (list, tuple)) and len(skip) == 2 else None
    if to_step is None:
        return Decision("restart", f"{why}; there is no earlier checkpoint", delay=_delay(cluster), skip=skip)
    return Decision("rollback", f"{why}: back to step {to_step}", (), _delay(cluster), to_step, skip)


def _repeats(diagnosis: Diagnosis, cluster: Cluster) -> bool:
    """Whether the same has happened before, on the same node where one is named."""
    now = diagnosis.first if diagnosis.first is not None else math.inf
    return any(
        failure.cause == diagnosis.cause and failure.node == diagnosis.node and now - failure.time < REPEAT_SECONDS
        for failure in cluster.failures
    )


def _flaps(diagnosis: Diagnosis, cluster: Cluster, rules: Rules) -> bool:
    """Whether a link of the node was down before, within LINK_SECONDS."""
    now = diagnosis.first if diagnosis.first is not None else math.inf
    before = cluster.rides + [
        (failure.time, failure.node)
        for failure in cluster.failures
        if (rules.get(failure.cause) or UNKNOWN_RULE).affects == "link"
    ]
    return any(node == diagnosis.node and 0 < now - time <= LINK_SECONDS for time, node in before)


def _same_step(cluster: Cluster) -> bool:
    last = cluster.failures[-1] if cluster.failures else None
    return (
        last is not None
        and None not in (last.step, cluster.step)
        and abs(last.step - cluster.step) <= 1
        and (cluster.resume_step is None or cluster.step >= cluster.resume_step)
    )
