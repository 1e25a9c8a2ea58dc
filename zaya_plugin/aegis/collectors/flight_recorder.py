# SPDX-License-Identifier: Apache-2.0
"""torch's flight recorder after a hang: which collectives each rank has enqueued, and so which rank did not arrive.

A rank that waits in a collective has enqueued it; the rank that did not arrive has not, so in that group its last number
is the lowest. Ranks that did not arrive in one group because they wait in another one are victims too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_plugin.aegis.collectors.runner import Collector
from zaya_plugin.aegis.evidence import Evidence, parsed


class FlightRecorder(Collector):
    """Sums up each dump of this node's ranks as one piece of evidence; `missing` takes those of all nodes."""

    name, source, interval, deadline = "flight_recorder", "agent", 0.25, 10.0

    def __init__(self, node: str, folder: Path | None = None):
        super().__init__(node)
        self.watch(folder)

    def watch(self, folder: Path | None) -> None:
        """Follow the ranks of a new attempt."""
        self._seen: dict[Path, str] = {}
        self._folder = folder

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
            except (
                OSError,
                ValueError,
                KeyError,
                TypeError,
                AttributeError,
                OverflowError,
            ):  # written by another version of torch
                continue
            last = values["last"]
            text = f"rank {rank} has enqueued {last['operation']} {last['number']} of {last['group']} last"
            evidence.append(
                self.found(now, "flight_record", text if last["group"] else "no collective", rank, **values)
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


def missing(by_rank: Mapping[int, Mapping[str, Any]], world: Collection[int] = ()) -> tuple[list[int], str]:
    """Return the ranks that others wait for, and a sentence that says why; [] if all have enqueued the same.

    by_rank: the values of the evidence flight_record, of all nodes and one request. world: all ranks of the job. One without a dump, while others have theirs, did not even answer its supervisor: it is
    stopped, gone, or holds the interpreter.
    """
    if silent := sorted(set(world) - by_rank.keys()) if by_rank else []:
        return silent, f"{_ranks(silent)} wrote no dump, and {len(by_rank)} other(s) did"
    groups: dict[str, dict[int, int]] = {}
    for rank, record in by_rank.items():
        for name, number in record["enqueued"].items():
            groups.setdefault(name, {})[rank] = number
    behind: dict[int, tuple[str, int, int]] = {}  # rank -> group, its number, the others' number
    waiting = set()
    for name, numbers in groups.items():
        most = max(numbers.values())
        late = {rank: number for rank, number in numbers.items() if number < most}
        if late:
            waiting |= {rank for rank in numbers if rank not in late and by_rank[rank]["last"]["group"] == name}
            for rank, number in late.items():
                if rank not in behind or number - most < behind[rank][1] - behind[rank][2]:
                    behind[rank] = name, number, most
    first = sorted(behind.keys() - waiting) or sorted(behind)
    if not first:
        return [], "all ranks have enqueued the same collectives"
    name, number, most = behind[first[0]]
    return first, f"{_ranks(first)} enqueued collective {number} of group {name} last, and others {most}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
