# SPDX-License-Identifier: Apache-2.0
"""The messages of a rank to the supervisor of its node: its phase, every finished step, and on request where it waits.

`zaya aegis run` sets ZAYA_AEGIS_DIR, a folder of the node; without it every function of this module returns at once.
In it:

    rank<N>.json         one line of LINE_BYTES bytes, written in place at every change of phase and at every step
    rank<N>.stacks       the stacks of all threads, appended at each STACKS_SIGNAL, also while a thread waits in C++
    request              a number, written by the supervisor; when it changes, each rank writes
    rank<N>.flight.json  torch's flight recorder: the collectives that this rank has enqueued
    rank<N>.guard.json   why a guard inside the run ends it (loss_guard.py)

All of it is the host's work: nothing is launched on a device, and no collective is called.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from zaya_plugin.ground.errors import STACKS_SIGNAL
from zaya_plugin.ground.whole_file import write_whole

FOLDER_VARIABLE = "ZAYA_AEGIS_DIR"
LINE_BYTES = 256  # bytes; a line of one size is replaced by one write
STAGE_LETTERS = 32  # letters of a stage, the last ones
PHASES = ("start", "build", "load", "warm_up", "train", "validate", "save", "end")
LOOK_SECONDS = 0.25  # between two looks for a request

_beat: Heartbeat | None = None  # a process is one rank


class Heartbeat:
    """The heartbeat file of one rank. A write that fails changes nothing for the rank."""

    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self.phase, self.last, self.stage = PHASES[0], 0, ""
        self.numbers: dict[str, float | str | None] = {"step_seconds": None, "busy_seconds": None, "loss": None}
        self.file = os.open(folder / f"rank{rank}.json", os.O_WRONLY | os.O_CREAT, 0o600)
        self.stacks = open(folder / f"rank{rank}.stacks", "a")
        faulthandler.register(STACKS_SIGNAL, file=self.stacks, all_threads=True)
        # The supervisor sends the signal to the pids in these files alone, so it is registered before the first line.
        self.write()
        threading.Thread(target=self._answer, name="flight recorder", daemon=True).start()

    def write(self) -> None:
        """Replace the line of this rank."""
        values = {"pid": os.getpid(), "phase": self.phase, "step": self.last, "time": round(time.time(), 3)}
        stage = {"stage": self.stage} if self.stage else {}
        line = json.dumps({**values, **self.numbers, **stage}).ljust(LINE_BYTES - 1) + "\n"
        with contextlib.suppress(OSError):
            os.pwrite(self.file, line.encode(), 0)

    def _answer(self) -> None:
        request, answered = self.folder / "request", None
        while True:
            with contextlib.suppress(OSError):
                if (text := request.read_text().strip()) and text != answered:
                    answered = text
                    self._dump(text)
            time.sleep(LOOK_SECONDS)

    def _dump(self, request: str) -> None:
        try:
            from torch._C._distributed_c10d import _dump_fr_trace_json

            trace = json.loads(_dump_fr_trace_json())
        except (ImportError, RuntimeError, ValueError) as error:  # a build of torch without it
            trace = {"error": str(error)}
        trace |= {"rank": self.rank, "request": request}
        write_whole(self.folder / f"rank{self.rank}.flight.json", json.dumps(trace))


def start(rank: int) -> None:
    """Begin the heartbeats of this rank, in phase `start`, where a supervisor asks for them."""
    global _beat
    if (folder := os.environ.get(FOLDER_VARIABLE)) and _beat is None:
        with contextlib.suppress(OSError):  # a supervisor that is gone ends the rank otherwise
            _beat = Heartbeat(Path(folder), rank)


def stage(name: str) -> None:
    """Name the stage whose steps these are: those of the next one of a curriculum count from 1 again."""
    if _beat is not None:
        _beat.stage = name.encode("ascii", "replace").decode()[-STAGE_LETTERS:]
        _beat.write()


def is_on() -> bool:
    """Whether this rank has a heartbeat."""
    return _beat is not None


def phase(name: str, step: int | None = None) -> None:
    """Say that the rank has come to a phase of PHASES. step: the last finished one, if it is known by now."""
    if _beat is not None:
        assert name in PHASES, name
        _beat.phase, _beat.last = name, _beat.last if step is None else step
        _beat.write()


@contextlib.contextmanager
def during(name: str) -> Iterator[None]:
    """Name the phase of a `with`; afterwards the phase is the one before."""
    before = None if _beat is None else _beat.phase
    phase(name)
    yield  # an error leaves the phase in which it came
    if before is not None:
        phase(before)


def step(number: int, seconds: float, busy: float | None = None, loss: float | None = None, warm: bool = False) -> None:
    """Say that a step has finished.

    seconds: from the end of the step before. busy: until this rank's gradients were there, before it waited for others.
    warm: the steps that compile and capture are over, so that the phase warm_up becomes train.
    """
    if _beat is None:
        return
    if loss is not None and not math.isfinite(loss):
        loss = str(loss)  # JSON has no NaN
    busy = None if busy is None else round(busy, 6)
    _beat.numbers = {"step_seconds": round(seconds, 6), "busy_seconds": busy, "loss": loss}
    _beat.last = number
    if warm and _beat.phase == "warm_up":
        _beat.phase = "train"
    _beat.write()


def guard(kind: str, text: str, **values) -> None:
    """Leave the reason for which a guard ends the run: rank<N>.guard.json, once."""
    if _beat is not None:
        reason = {"kind": kind, "rank": _beat.rank, "time": time.time(), "text": text, **values}
        with contextlib.suppress(OSError):
            write_whole(_beat.folder / f"rank{_beat.rank}.guard.json", json.dumps(reason))
