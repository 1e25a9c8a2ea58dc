# SPDX-License-Identifier: Apache-2.0
"""Stacks and flight recorders, which the ranks of this node are asked for before they are ended."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from zaya_plugin.aegis.collectors.flight_recorder import FlightRecorder
from zaya_plugin.aegis.collectors.progress import read_beats
from zaya_plugin.ground import processes
from zaya_plugin.ground.errors import STACKS_SIGNAL

DUMP_SECONDS = 2.0  # for stacks and flight recorders


def ask_for_dumps(folder: Path, logs: Path, recorder: FlightRecorder, meanwhile: Callable[[], None]) -> list[int]:
    """Ask the ranks for stacks and flight recorders, keep what they write with the logs, and return who was asked.

    Only a process that names itself in a heartbeat knows the signal: it would end others, such as a shell around the
    rank. meanwhile: called again and again while this waits.
    """
    ours = set(
        processes.started_with(processes.ranks_mark(folder))
    )  # a number in a file may be another process's by now
    asked = {rank: beat["pid"] for rank, beat in read_beats(folder).items() if beat.get("pid") in ours}
    before = {rank: written(folder, rank) for rank in asked}
    recorder.ask()
    processes.send(list(asked.values()), STACKS_SIGNAL)
    deadline = time.monotonic() + DUMP_SECONDS
    while time.monotonic() < deadline:
        now = {rank: written(folder, rank) for rank in asked}
        if all(new > old for rank in asked for new, old in zip(now[rank], before[rank], strict=True)):
            break
        meanwhile()
        time.sleep(0.05)
    for path in folder.glob("rank*"):
        if path.suffix != ".json" or ".flight" in path.name or ".guard" in path.name:
            with contextlib.suppress(OSError):  # the disk of the logs may be what fails
                shutil.copyfile(path, logs / path.name)
    time.sleep(1.5 * recorder.interval)  # until the dumps are read
    return list(asked)


def written(folder: Path, rank: int) -> tuple[int, int]:
    """Return when the stacks and the flight recorder of a rank were written last."""

    def stamp(path: Path) -> int:
        return path.stat().st_mtime_ns if path.exists() else -1

    return stamp(folder / f"rank{rank}.stacks"), stamp(folder / f"rank{rank}.flight.json")
