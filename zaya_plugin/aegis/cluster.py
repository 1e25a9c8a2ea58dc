# SPDX-License-Identifier: Apache-2.0
"""The state of a supervised run, rebuilt from its journal: what a decision depends on, and nothing else.

The decision maker applies each line that it writes, and after its own crash the lines that it finds, with the same
function.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from zaya_plugin.aegis.journal import sound

NULLS = {"attempt": ("resume_step",), "diagnosis": ("node", "rank")}  # fields that may be null
OUT = "out"  # a node that this run does not use any more
LONG = 1800.0  # seconds of an attempt of another program after which failures before do not count


@dataclass(frozen=True)
class Failure:
    """A diagnosis upon which ranks were ended or a link was waited for.

    step: the last step of the attempt, None: it made none. best: stage and last step that the run has ever made.
    seconds: since the attempt's start.
    """

    time: float
    generation: int
    cause: str
    node: str | None
    rank: int | None
    fingerprint: str
    step: int | None
    best: tuple[int, int]
    seconds: float = 0.0


@dataclass
class Cluster:
    """The state of the run, from its journal.

    wanted, sizes: numbers of nodes, asked for and possible (the largest first). group: nodes that hold one copy of the
    model. restarts: failures in a row without a new step after which the run stops.
    nodes: of the attempt, in the order of their ranks. spares: those that have joined and wait, the best first.
    trained: whether an attempt has started before, so that the next one continues. since: the start of the attempt.
    out: nodes that are not used any more, and why.
    step: the last step of this attempt; first_step: the first one; best: the last one ever; checkpoints: their steps.
    stages: whether steps may begin anew, as in a curriculum; stage: how often they have; stage_name: of the last one.
    skips: first and last steps whose data are left out, by roll backs.
    pending: the decision that was not carried out yet. asked: the run was asked to end.
    """

    wanted: int = 1
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
    links: list[tuple[float, str]] = field(default_factory=list)
    rollbacks: int = 0
    turns: int = 0
    skips: list[tuple[int, int]] = field(default_factory=list)
    pending: dict[str, Any] | None = None
    asked: bool = False
    _diagnosis: dict[str, Any] | None = None

    def replay(self, rows: Iterable[dict[str, Any]]) -> Cluster:
        """Apply the lines of a journal, and return this."""
        for row in rows:
            before = dict(self.__dict__)
            try:
                self.apply({**dict.fromkeys(NULLS.get(row["kind"], ())), **sound(row)})
            except (LookupError, TypeError, ValueError, AttributeError):  # damaged, or of another version
                self.__dict__ = before
        return self

    def apply(self, row: dict[str, Any]) -> None:
        """Apply one line of the journal."""
        getattr(self, f"_on_{row['kind']}", lambda row: None)(row)

    @property
    def barren(self) -> list[Failure]:
        """The failures since the last new step of the run, the latest last."""
        failures = [failure for failure in self.failures if failure.best >= (self.stage, self.best)]
        # The steps of another program may be those of its next stage, or not be told.
        last = max(
            (i for i, one in enumerate(failures) if one.seconds > LONG and (self.stages or one.step is None)), default=0
        )
        return failures[last:]

    def node_of(self, rank: int, ranks_per_node: int) -> str:
        """Return the node of a rank, "" for one that the attempt should not have."""
        position = rank // ranks_per_node
        return self.nodes[position] if 0 <= position < len(self.nodes) else ""

    def begins_stage(self, name: str | None, step: int) -> bool:
        """Whether a step is of a stage after the last one: of another name or, where names are not told, with steps that
        count from 1 again within an attempt.
        """
        if name and self.stage_name:
            return self.stages and name != self.stage_name
        return self.stages and not name and self.step is not None and 0 < step < self.step

    def before(self, step: int | None) -> int | None:
        """Return the newest checkpoint before `step`; None: the start, or the checkpoints are not known."""
        return max((checkpoint for checkpoint in self.checkpoints if step is None or checkpoint < step), default=None)

    def _on_begin(self, row: dict[str, Any]) -> None:
        # A person has started the command again: earlier failures, and nodes that were taken out, do not count.
        fresh = Cluster(self.wanted, self.sizes, self.group, self.restarts, self.requeue, self.stages)
        fresh.generation, fresh.checkpoints, fresh.best = self.generation, self.checkpoints, self.best
        fresh.trained, fresh.skips = self.best > 0, self.skips  # what was left out stays out, or the losses change
        fresh.stage_name = self.stage_name
        self.__dict__.update(fresh.__dict__)
        self.begun, self.command = True, row["command"]

    def _on_end(self, row: dict[str, Any]) -> None:
        self.ended, self.running, self.pending = True, False, None

    def _on_node(self, row: dict[str, Any]) -> None:
        if row["state"] == OUT:
            self.out[row["node"]] = row["reason"]
        elif row["state"] == "back":
            self.out.pop(row["node"], None)

    def _on_attempt(self, row: dict[str, Any]) -> None:
        self.generation, self.nodes, self.running = row["generation"], tuple(row["nodes"]), True
        self.resume_step, self.first_step, self.step = row["resume_step"], None, None
        self.pending = self._diagnosis = None
        self.trained, self.since = True, row["time"]

    def _on_first_step(self, row: dict[str, Any]) -> None:
        self.first_step = row["step"]
        self.used |= set(self.nodes)
        self._on_progress(row)

    def _on_progress(self, row: dict[str, Any]) -> None:
        if self.begins_stage(row.get("stage"), row["step"]):
            self.stage, self.best = self.stage + 1, 0
        self.stage_name = row.get("stage") or self.stage_name
        self.step, self.best = row["step"], max(self.best, row["step"])
        self.step_seconds = row.get("step_seconds") or self.step_seconds

    def _on_checkpoint(self, row: dict[str, Any]) -> None:
        self.checkpoints = sorted({*self.checkpoints, row["step"]})

    def _on_diagnosis(self, row: dict[str, Any]) -> None:
        self._diagnosis = row

    def _on_decision(self, row: dict[str, Any]) -> None:
        diagnosis, self._diagnosis = self._diagnosis, None
        if row["action"] == "watch" or diagnosis is None:
            return
        if row["action"] == "ride":
            self.links.append((row["time"], str(diagnosis["node"])))
            return
        self.failures.append(
            Failure(
                row["time"],
                row["generation"],
                diagnosis["cause"],
                diagnosis["node"],
                diagnosis["rank"],
                diagnosis["fingerprint"],
                self.step,
                (self.stage, self.best),
                row["time"] - self.since,
            )
        )
        self.pending, self.running = row, False
        self.out |= dict.fromkeys(row.get("nodes_out") or (), diagnosis["cause"])
        self.turns += diagnosis["cause"] == "rerun_other_gpu"
        if row.get("skip") and tuple(row["skip"]) not in self.skips:
            self.skips.append(tuple(row["skip"]))
        if row["action"] == "rollback":
            self.rollbacks += 1
            if row["to_step"] is not None:
                self.checkpoints = [step for step in self.checkpoints if step <= row["to_step"]]
