# SPDX-License-Identifier: Apache-2.0
"""The files that the ranks of this node write (zaya_plugin.training.heartbeat): heartbeats, evidence of guards, and
torch's flight recorder after a hang.

The budget of a step is three times the slowest of the last steps, at least FLOOR. Nodes whose ranks finish no step for
1.5 budgets hang. All ranks of a job stop together when one does, so the evidence names the ranks that differ: stopped
or in state D, or behind by a step. Outside of training (imports, compilation, loading, saving) the limits are minutes,
but for a process that was stopped (SIGSTOP).

A rank that waits in a collective has enqueued it; the rank that did not arrive has not, so in that group its last
number is the lowest. Ranks that did not arrive in one group because they wait in another one are victims too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zaya_plugin.aegis.collectors.runner import Collector
from zaya_plugin.aegis.diagnose.evidence import Evidence, is_number, parsed, printable

# Seconds without any news in a phase; the first start of a run compiles, tunes and builds indices of its data.
LIMITS = {"start": 900, "build": 3600, "load": 3600, "warm_up": 3600, "validate": 1800, "save": 1800, "end": 3600}
STEPS = 20  # from which the budget is learnt
BUDGET, WITHOUT = 3.0, 1.5  # budget: x slowest step; a hang: x budget
FLOOR = 5.0  # seconds
HOLD = 900.0  # seconds for which a stall of storage excuses ranks without progress
LONGEST_PAUSE = 5.0  # seconds between two polls that count: the agent itself may have been stopped


@dataclass
class Rank:
    """One rank: its last heartbeat, and seconds without news."""

    beat: dict
    idle: float = 0.0


class Progress(Collector):
    """Compares the heartbeats with the budget of a step.

    stalled: whether storage of this node does not answer at present; a hang is then held back, for HOLD at most.
    """

    name, source, interval, deadline = "progress", "progress", 0.5, 5.0

    def __init__(
        self,
        node: str,
        folder: Path | None = None,
        expected: Collection[int] = (),
        stalled: Callable[[], bool] = lambda: False,
        proc: Path = Path("/proc"),
    ):
        super().__init__(node)
        self.stalled, self.proc = stalled, proc
        self.watch(folder, expected)

    def watch(self, folder: Path | None, expected: Collection[int] = ()) -> None:
        """Follow the ranks of a new attempt. expected: ranks that must have a heartbeat; other ranks may have none."""
        self._ranks = {rank: Rank({"phase": "start", "step": 0}) for rank in expected}
        self._seconds: deque[float] = deque(maxlen=STEPS)
        self._newest = 0
        self._before: float | None = None
        self._reported, self._held = False, 0.0
        self._folder = folder  # last: the thread that polls may be between two lines

    def budget(self) -> float:
        """Return the seconds that a step may take."""
        return max(FLOOR, BUDGET * max(self._seconds, default=0.0))

    def poll(self, now: float) -> list[Evidence]:
        ranks, folder = self._ranks, self._folder
        passed = 0.0 if self._before is None else min(max(0.0, now - self._before), LONGEST_PAUSE)
        self._before = now
        fresh = set()
        for rank, beat in read_beats(folder).items() if folder is not None else ():
            known = ranks.setdefault(rank, Rank({}))
            if beat == known.beat:
                continue
            if known.beat.get("pid") not in (None, beat.get("pid")):  # the next stage: longer steps that count from 1
                self._newest = 0
                self._seconds.clear()
            if (
                beat["step"] != known.beat.get("step")
                and beat["phase"] == "train"
                and known.beat.get("phase") == "train"
                and beat["step"] > self._newest  # other ranks report the same step
            ):
                self._newest = beat["step"]
                self._seconds.append(float(beat.get("step_seconds") or 0.0))
            known.beat, known.idle = beat, 0.0
            fresh.add(rank)
        stalled = self.stalled()
        self._held = self._held + passed if stalled else 0.0
        if not stalled or self._held > HOLD:
            for rank in ranks.keys() - fresh:
                ranks[rank].idle += passed
        return self._hang(now, ranks)

    def _limit(self, beat: Mapping) -> float:
        if beat["phase"] != "train":
            return LIMITS.get(beat["phase"], LIMITS["warm_up"])
        # Before a second step the first one, which compiles too, is the only measure.
        first = 0.0 if self._seconds else BUDGET * float(beat.get("step_seconds") or 0.0)
        return WITHOUT * max(first, self.budget())

    def _is_late(self, rank: Rank) -> bool:
        # A stopped process does not continue by itself, in any phase.
        stopped = rank.idle > WITHOUT * FLOOR and self._state(rank.beat.get("pid")) == "T"
        return stopped or rank.idle > self._limit(rank.beat)

    def _hang(self, now: float, ranks: Mapping[int, Rank]) -> list[Evidence]:
        late = {rank: known for rank, known in ranks.items() if self._is_late(known)}
        if not late or self._reported:
            self._reported = bool(late)
            return []
        self._reported = True
        states = {rank: self._state(known.beat.get("pid")) for rank, known in late.items()}
        halted = [rank for rank, state in states.items() if state in "TtD"]
        steps = {rank: known.beat["step"] for rank, known in ranks.items()}
        behind = [rank for rank in late if steps[rank] < max(steps.values())]
        suspects = halted if 0 < len(halted) < len(ranks) or len(ranks) == 1 else behind
        # Evidence is of one rank or of the node.
        rank = suspects[0] if len(suspects) == 1 else None
        first = late[min(late)] if rank is None else late[rank]
        idle = max(known.idle for known in late.values())
        text = f"no step for {idle:.0f} s in phase {first.beat['phase']} after step {first.beat['step']}"
        if suspects:
            text += f"; ranks {sorted(suspects)} differ (state {', '.join(sorted({states[s] for s in suspects}))})"
        return [
            self.evidence(
                now - idle,
                "hang",
                text,
                rank,
                idle=round(idle, 1),
                limit=self._limit(first.beat),
                phase=first.beat["phase"],
                ranks=sorted(late),
                steps=steps,
                states=states,
                suspects=sorted(suspects),
            )
        ]

    def _state(self, pid: object) -> str:
        """Return the kernel's letter for a process: T stopped, D in the kernel, X gone."""
        try:
            return (self.proc / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            return "X"


def read_beats(folder: Path) -> dict[int, dict]:
    """Return the heartbeats in a folder, rank -> fields; a line that cannot be read is left out."""
    beats = {}
    for path in folder.glob("rank*.json"):
        number = path.name[len("rank") : -len(".json")]
        if not number.isdecimal():  # rank<N>.flight.json, rank<N>.guard.json
            continue
        try:
            beats[int(number)] = valid_beat(parsed(path.read_text()))
        except (OSError, ValueError):
            continue
    return beats


def valid_beat(beat: object) -> dict:
    """Return the fields of a heartbeat that have their type. Raises ValueError without a phase and a step."""
    fields = beat if isinstance(beat, dict) else {}
    if not isinstance(fields.get("phase"), str) or not is_number(fields.get("step"), int):
        raise ValueError("not a heartbeat")
    numbers = {name: fields[name] for name in ("time", "step_seconds", "busy_seconds") if is_number(fields.get(name))}
    texts = {name: fields[name][:64] for name in ("phase", "stage", "loss") if isinstance(fields.get(name), str)}
    loss = {"loss": fields["loss"]} if is_number(fields.get("loss")) else {}
    pid = {"pid": fields["pid"]} if is_number(fields.get("pid"), int) else {}
    return {**pid, "step": fields["step"], **numbers, **loss, **texts}


class _Files(Collector):
    """Reads files of the ranks."""

    def __init__(self, node: str, folder: Path | None = None):
        super().__init__(node)
        self.watch(folder)

    def watch(self, folder: Path | None) -> None:
        """Follow the ranks of a new attempt."""
        self._seen: dict[Path, object] = {}
        self._folder = folder


class Guards(_Files):
    """Turns rank<N>.guard.json, of guards inside the run before a rank ended, into one piece of evidence; its kind is
    the name of the rule: loss_spike, non_finite.
    """

    name, source, interval, deadline = "guards", "rank", 0.5, 5.0

    def poll(self, now: float) -> list[Evidence]:
        evidence = []
        for path in sorted(self._folder.glob("rank*.guard.json")) if self._folder is not None else ():
            if path in self._seen:
                continue
            try:
                values = dict(parsed(path.read_text()))
                at, kind, text, rank = (values.pop(name) for name in ("time", "kind", "text", "rank"))
                at, rank = float(at), int(rank)
            except (OSError, ValueError, TypeError, KeyError, OverflowError):
                continue
            self._seen[path] = at
            evidence.append(Evidence(at, self.node, self.source, printable(str(text)), rank, str(kind), values))
        return evidence


class FlightRecorder(_Files):
    """Sums up each dump of this node's ranks as one piece of evidence; `missing_ranks` compares those of all nodes."""

    name, source, interval, deadline = "flight_recorder", "agent", 0.25, 10.0

    def ask(self) -> None:
        """Ask the ranks of this node for their dumps."""
        path = self._folder / "request"
        try:
            before = int(path.read_text())
        except (OSError, ValueError):
            before = 0
        path.write_text(str(before + 1))

    def poll(self, now: float) -> list[Evidence]:
        evidence = []
        for path in sorted(self._folder.glob("rank*.flight.json")) if self._folder is not None else ():
            try:
                dump = parsed(path.read_text())
                if self._seen.get(path) == dump["request"]:
                    continue
                self._seen[path] = dump["request"]
                rank, values = int(dump["rank"]), summary(dump)
            except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError):
                continue  # written by another version of torch
            last = values["last"]
            text = f"rank {rank} has enqueued {last['operation']} {last['number']} of {last['group']} last"
            evidence.append(
                self.evidence(now, "flight_record", text if last["group"] else "no collective", rank, **values)
            )
        return evidence


def summary(dump: Mapping[str, Any]) -> dict[str, Any]:
    """Return of a dump: request, `enqueued` (group -> last number), and `last`, its newest entry."""
    enqueued: dict[str, int] = {}
    last: dict[str, Any] = {"group": None, "operation": None, "number": 0, "time": 0}
    for entry in dump.get("entries") or []:
        if entry.get("is_p2p"):
            continue  # a message between two stages has no number of the group
        name, number = ":".join(entry["process_group"]), int(entry["collective_seq_id"])
        enqueued[name] = max(enqueued.get(name, 0), number)
        if entry.get("time_created_ns", 0) >= last["time"]:
            operation = str(entry.get("profiling_name", "")).partition(":")[2] or entry.get("profiling_name")
            last = {"group": name, "operation": operation, "number": number, "time": entry.get("time_created_ns", 0)}
    return {"request": str(dump["request"]), "enqueued": enqueued, "last": last}
