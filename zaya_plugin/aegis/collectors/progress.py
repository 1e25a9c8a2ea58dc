# SPDX-License-Identifier: Apache-2.0
"""The heartbeats of this node's ranks (zaya_plugin.training.heartbeat): a rank without progress.

The budget of a step is three times the slowest of the last steps, at least FLOOR. Nodes whose ranks finish no step for
1.5 budgets hang. All ranks of a job stop together when one does, so the evidence names the ranks that differ: stopped
or in state D, or behind by a step. Outside of training (imports, compilation, loading, saving) the limits are minutes,
but for a process that was stopped (SIGSTOP).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from zaya_plugin.aegis.collectors.runner import Collector
from zaya_plugin.aegis.evidence import Evidence, parsed

# Seconds without any news in a phase; the first start of a run compiles, tunes and builds indices of its data.
LIMITS = {"start": 900, "build": 3600, "load": 3600, "warm_up": 3600, "validate": 1800, "save": 1800, "end": 3600}
STEPS = 20  # from which the budget is learnt
BUDGET, WITHOUT = 3.0, 1.5  # budget: x slowest step; a hang: x budget
FLOOR = 5.0  # seconds
HOLD = 900.0  # seconds for which a stall of storage excuses ranks without progress
LARGEST = 1e15  # of a number in a heartbeat
LONGEST = 5.0  # seconds between two polls that count: the agent itself may have been stopped


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
        self._told, self._held = False, 0.0
        self._folder = folder  # last: the thread that polls may be between two lines

    def budget(self) -> float:
        """Return the seconds that a step may take."""
        return max(FLOOR, BUDGET * max(self._seconds, default=0.0))

    def poll(self, now: float) -> list[Evidence]:
        ranks, folder = self._ranks, self._folder
        passed = 0.0 if self._before is None else min(max(0.0, now - self._before), LONGEST)
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
        # A stopped process does not go on by itself, in any phase.
        stopped = rank.idle > WITHOUT * FLOOR and self._state(rank.beat.get("pid")) == "T"
        return stopped or rank.idle > self._limit(rank.beat)

    def _hang(self, now: float, ranks: Mapping[int, Rank]) -> list[Evidence]:
        late = {rank: known for rank, known in ranks.items() if self._is_late(known)}
        if not late or self._told:
            self._told = bool(late)
            return []
        self._told = True
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
            self.found(
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
            beats[int(number)] = sound_beat(parsed(path.read_text()))
        except (OSError, ValueError):
            continue
    return beats


def sound_beat(beat: object) -> dict:
    """Return the fields of a heartbeat that are of their kind. Raises ValueError without a phase and a step."""
    fields = beat if isinstance(beat, dict) else {}
    if not isinstance(fields.get("phase"), str) or not _is_number(fields.get("step"), int):
        raise ValueError("no heartbeat")
    numbers = {name: fields[name] for name in ("time", "step_seconds", "busy_seconds") if _is_number(fields.get(name))}
    texts = {name: fields[name][:64] for name in ("phase", "stage", "loss") if isinstance(fields.get(name), str)}
    loss = {"loss": fields["loss"]} if _is_number(fields.get("loss")) else {}
    pid = {"pid": fields["pid"]} if _is_number(fields.get("pid"), int) else {}
    return {**pid, "step": fields["step"], **numbers, **loss, **texts}


def _is_number(value: object, kind: type | tuple[type, ...] = (int, float)) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool) and 0 <= abs(value) < LARGEST
