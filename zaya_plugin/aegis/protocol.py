# SPDX-License-Identifier: Apache-2.0
"""The messages between agents and the decider (MESSAGES), and the rows of the journal (ROWS): one dataclass each.

Both are JSON objects of their fields and a `kind`. A row also has its time and the generation: the number of the
attempt, 0 before the first one. An annotation is the type that a value from outside must have.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from zaya_plugin.aegis.diagnose.evidence import Evidence, is_number

Number = int | float
ListOrTuple = list | tuple
BEAT_SECONDS = 2.0  # between two heartbeats of an agent whose ranks train

# ---- messages ----


@dataclass
class OfAttempt:
    """generation: of the attempt that a message is about."""

    generation: int


# from an agent to the decider


@dataclass
class Join(OfAttempt):
    """The first message of a connection.

    address: of the node, for the other nodes. running: its ranks that run; codes: the exit codes of the others.
    """

    node: str
    address: str
    pid: int
    running: list
    codes: dict


@dataclass
class Beat(OfAttempt):
    """A heartbeat. time: by the agent's clock. ranks: rank -> its own heartbeat."""

    time: Number
    ranks: dict


@dataclass
class EvidenceBatch(OfAttempt):
    """rows: each of one Evidence."""

    rows: list


@dataclass
class Started(OfAttempt):
    """The ranks were started."""


@dataclass
class RankExit(OfAttempt):
    """A rank has ended."""

    rank: int
    code: int
    time: Number


@dataclass
class FreePort(OfAttempt):
    """The answer to FindPort."""

    port: int


@dataclass
class Dumped(OfAttempt):
    """The ranks have written their stacks and flight recorders, or the time for it has passed."""


@dataclass
class Ended(OfAttempt):
    """The ranks have ended. survivors: processes that survive SIGKILL."""

    survivors: list


@dataclass
class SurvivorsEnded(OfAttempt):
    """The processes that survived SIGKILL have ended."""


@dataclass
class EndSignal(OfAttempt):
    """The agent received a signal that ends the run. times: the number of such signals."""

    number: int
    times: int


# from the decider to an agent


@dataclass
class BeatAnswer:
    """The answer to a Beat. echo: its time. time: by the decider's clock."""

    echo: Number
    time: Number


@dataclass
class BeatRequest(OfAttempt):
    """Send a heartbeat now."""


@dataclass
class FindPort(OfAttempt):
    """Find a free port for the store of the ranks."""


@dataclass
class Start(OfAttempt):
    """Start the ranks.

    nodes: how many. node_rank: this node's place among them; first_rank: of this node. address, port: of the store of
    the ranks. turn: places by which the devices are rotated.
    """

    nodes: int
    node_rank: int
    first_rank: int
    address: str
    port: int
    command: list
    turn: int


@dataclass
class Dump(OfAttempt):
    """Ask the ranks for their stacks and flight recorders."""


@dataclass
class Save(OfAttempt):
    """Ask the ranks to save and leave."""


@dataclass
class Stop(OfAttempt):
    """End the ranks. grace: seconds from SIGTERM to SIGKILL."""

    grace: Number


@dataclass
class Leave:
    """The run has ended with this exit code."""

    code: int


MESSAGES = {
    message.__name__: message
    for message in (
        *(Join, Beat, EvidenceBatch, Started, RankExit, FreePort, Dumped, Ended, SurvivorsEnded, EndSignal),
        *(BeatAnswer, BeatRequest, FindPort, Start, Dump, Save, Stop, Leave),
    )
}

# ---- the journal ----


@dataclass(kw_only=True)
class Row:
    """time: seconds since 1970. Both fields are set when the row is written."""

    time: Number | None = None
    generation: int | None = None


@dataclass
class Begin(Row):
    """A person has started the command. nodes: the number that trains."""

    command: list = field(default_factory=list)
    nodes: int | None = None
    spares: int = 0
    ranks_per_node: int | None = None
    version: str = ""


@dataclass
class DeciderStart(Row):
    """The decider has started, for the first time or after it was killed."""

    pid: int | None = None
    reason: str = ""


JOINED, LOST, OUT, BACK = "joined", "lost", "out", "back"  # out: this run uses the node no more


@dataclass
class NodeChange(Row):
    """state: joined, lost, out or back."""

    node: str
    state: str
    reason: str = ""


@dataclass
class AttemptStart(Row):
    """nodes: their names in the order of their ranks. resume_step: of the newest checkpoint."""

    nodes: list = field(default_factory=list)
    world_size: int | None = None
    resume_step: int | None = None


@dataclass
class Progress(Row):
    """The step that all ranks have made: about once a minute, and at the end of an attempt.

    at: when the step was observed, if that was before this row. stage: its name, where a command has several.
    after: the step that the ranks of an attempt, or of a stage, continue from.
    """

    step: int
    step_seconds: Number | None = None
    at: Number | None = None
    stage: str | None = None
    after: int | None = None


@dataclass
class FirstStep(Progress):
    """The first step of an attempt."""


@dataclass
class Checkpoint(Row):
    """A manifest has appeared."""

    step: int


@dataclass
class Symptom(Row):
    """The evidence that starts a diagnosis: detected at the row's time, happened at the evidence's."""

    evidence: Evidence


@dataclass
class Diagnosis(Row):
    """The first cause, or "unknown".

    first: the time of the cause. evidence: its line first, then the confirmations. cascades: row -> how many lines.
    fingerprint: an equal text for an equal failure; see `Rule.repeats`.
    """

    cause: str = "unknown"
    node: str | None = None
    rank: int | None = None
    role: str = "root"
    severity: str = "high"
    confidence: str = "weak"
    first: Number | None = None
    evidence: list[Evidence] = field(default_factory=list)
    cascades: dict = field(default_factory=dict)
    fingerprint: str = "unknown"


@dataclass
class Decision(Row):
    """The reaction to a diagnosis.

    action: ride, restart, exchange, shrink, rollback, requeue, stop, watch or done. reason: one sentence.
    nodes_out: nodes that the run uses no more. delay: seconds to wait first. to_step: the checkpoint to go back to.
    skip: the first and the last step whose data are left out. start: of the SLURM job that a requeue gives back.
    """

    action: str
    reason: str = ""
    nodes_out: ListOrTuple = ()
    delay: Number = 0.0
    to_step: int | None = None
    skip: ListOrTuple | None = None
    start: str | None = None


@dataclass
class Stopped(Row):
    """The ranks of the attempt have ended."""

    seconds: Number | None = None
    survivors: list = field(default_factory=list)


@dataclass
class Alert(Row):
    """delivered: channel -> "ok" or the problem."""

    text: str
    delivered: dict = field(default_factory=dict)


@dataclass
class End(Row):
    """The run has ended."""

    code: int | None = None
    reason: str = ""


ROWS = {
    "begin": Begin,
    "decider": DeciderStart,
    "node": NodeChange,
    "attempt": AttemptStart,
    "first_step": FirstStep,
    "progress": Progress,
    "checkpoint": Checkpoint,
    "symptom": Symptom,
    "diagnosis": Diagnosis,
    "decision": Decision,
    "stopped": Stopped,
    "alert": Alert,
    "end": End,
}
EVIDENCE_FIELDS = {column.name for column in fields(Evidence)}
KINDS = {kind: name for name, kind in (MESSAGES | ROWS).items()}


def to_json(item: Any) -> dict[str, Any]:
    """Return a message or a row as plain data."""
    values = {column.name: _plain(getattr(item, column.name)) for column in fields(item)}
    return {"kind": KINDS[type(item)], **values}


def _plain(value: Any) -> Any:
    if isinstance(value, Evidence):
        return value.to_json()
    return [_plain(item) for item in value] if isinstance(value, ListOrTuple) else value


def message_of(body: dict[str, Any]) -> Any:
    """Return the message of a JSON object. Raises KeyError or TypeError for one of another version."""
    kind = MESSAGES[body["kind"]]
    values = {column.name: body[column.name] for column in fields(kind)}
    for column in fields(kind):
        if not _fits(values[column.name], column.type):
            raise TypeError(f"{column.name} is {values[column.name]!r:.40}")
    return kind(**values)


def row_of(line: dict[str, Any]) -> Row:
    """Return the row of a line of the journal; a Row without a kind if the line lacks what its kind needs.

    A value of another type counts as missing: a disk may have damaged it, or another version has written it.
    """
    kind, values = ROWS.get(str(line.get("kind")), Row), dict(line)
    if isinstance(values.get("evidence"), list):
        values["evidence"] = [item for value in values["evidence"] if (item := _evidence(value)) is not None]
    elif "evidence" in values:
        values["evidence"] = _evidence(values["evidence"])
    valid = {
        column.name: values.get(column.name) for column in fields(kind) if _fits(values.get(column.name), column.type)
    }
    try:
        return kind(**valid)
    except TypeError:
        return Row(time=valid.get("time"), generation=valid.get("generation"))


def _evidence(value: Any) -> Evidence | None:
    """Return evidence in a journal, without the fields of another version."""
    try:
        return Evidence.from_json({name: value[name] for name in EVIDENCE_FIELDS & value.keys()})
    except (TypeError, AttributeError):
        return None


def _fits(value: Any, allowed: Any) -> bool:
    """Whether a value from outside has the type of its field, and a number can be calculated with."""
    kind = list if allowed == list[Evidence] else allowed
    return isinstance(value, kind) and (is_number(value) or not isinstance(value, Number))
