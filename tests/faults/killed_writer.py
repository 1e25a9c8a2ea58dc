# SPDX-License-Identifier: Apache-2.0
"""A rank and a writer that stop at a chosen point of a save, so that tests.faults.random_kills can kill them there.

A point is a call into the system (open, write, fsync, rename, mkdir, unlink, ...) in the writer, and the copy of a
tensor in the rank. The order of the points is the same in every run, so a seed names the same point again.

`python -m tests.faults.killed_writer <socket> <memory>` is `zaya_plugin.checkpoint.writer` with points. KILL_AT in the
environment is {"folder": ..., "rank", "phase", "save", "call"}; the process that reaches the point writes its name into
the folder and stops itself (SIGSTOP). Without "phase" nothing stops, and the points are counted in the folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from zaya_plugin.checkpoint.direct_file import ALIGNMENT

KILL_AT = "ZAYA_TEST_KILL_AT"
WRITER = "zaya_plugin.checkpoint.writer"
SMALL_PIECE = 2**15  # bytes of one write, so that a small file has many
EVENTS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")  # of sys.audit
RARE = ("writing", "waiting", "uploading")  # by the clock
CALLS = ("pwrite", "fsync", "posix_fadvise")


class Points:
    """Counts the points of the saves of one process."""

    def __init__(self):
        self.at = json.loads(os.environ[KILL_AT])
        self.folder = Path(self.at["folder"])
        self.phase = ""
        self.save = 0
        self.counts: Counter[tuple[str, int]] = Counter()
        self._quiet = False
        self._lock = threading.Lock()  # the file is written by threads

    def begin(self, phase: str, save: int) -> None:
        """Enter a phase of a save."""
        self.phase, self.save = phase, save

    def __call__(self, name: str) -> None:
        """Pass a point, or stop there."""
        if not self.phase or self._quiet:
            return
        key = self.phase, self.save
        with self._lock:
            if [*key, self.counts[key]] == [self.at.get(name) for name in ("phase", "save", "call")]:
                self._quiet = True
                (self.folder / "reached.new").write_text(json.dumps({"pid": os.getpid(), "point": name}))
                os.rename(self.folder / "reached.new", self.folder / "reached")
                os.kill(os.getpid(), signal.SIGSTOP)
                self._quiet = False
            self.counts[key] += 1

    def keep_counts(self) -> None:
        """Write how many points there were, for the choice of one."""
        if "phase" not in self.at:
            self._quiet = True
            rows = [[*key, count] for key, count in self.counts.items()]
            (self.folder / f"points_{os.environ['RANK']}_{os.getpid()}.json").write_text(json.dumps(rows))
            self._quiet = False


def entering(points: Points, phase: str, method: Callable) -> Callable:
    """Return `method` of Writer, which begins a phase."""

    def begun(self, save, *more):
        points.begin(phase, save.number)
        return method(self, save, *more)

    return begun


def main(argv: list[str]) -> None:
    """Serve as the writer does."""
    from zaya_plugin.checkpoint import direct_file, places, writer

    direct_file.PIECE = places.PIECE = SMALL_PIECE
    points = Points()
    (points.folder / f"writer_{os.getpid()}").write_text(os.environ["RANK"])
    for phase, name in {
        "writing": "save",
        "describing": "describe",
        "uploading": "upload",
        "committing": "complete",
        "pruning": "prune",
    }.items():
        setattr(writer.Writer, name, entering(points, phase, getattr(writer.Writer, name)))
    tell = writer.Writer.tell

    def told(self, state, **more):
        tell(self, state, **more)
        if state not in RARE:
            points(f"told {state}")

    writer.Writer.tell = told
    prune = writer.Writer.prune

    def pruned(self, save):
        prune(self, save)
        points.keep_counts()
        points.phase = ""

    writer.Writer.prune = pruned
    for name in CALLS:
        setattr(os, name, after(points, name, getattr(os, name)))

    def audited(event: str, arguments: tuple) -> None:
        if event in EVENTS and (event != "open" or arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            points(f"{event} {Path(str(arguments[0])).name}")

    sys.addaudithook(audited)
    writer.main(argv)


def after(points: Points, name: str, call: Callable) -> Callable:
    """Return `call` with a point before it; `pwrite` writes a part of its bytes before."""

    def called(descriptor, what=None, *more):
        if what is None:
            points(name)
            return call(descriptor)
        if name == "pwrite" and (half := len(what) // 2 // ALIGNMENT * ALIGNMENT):
            count = call(descriptor, what[:half], *more)
            points("in the middle of a write")
            return count
        points(name)
        return call(descriptor, what, *more)

    return called


def install(folder: Path, at: dict) -> None:
    """In a rank: start this file for the writer, and count the copies of tensors."""
    from zaya_plugin.checkpoint import saver

    os.environ[KILL_AT] = json.dumps({"folder": str(folder), **at})
    if at.get("phase") == "copying" or at.get("rank") not in (None, int(os.environ["RANK"])):
        os.environ[KILL_AT] = json.dumps({"folder": str(folder), "phase": ""})  # nothing stops in this rank's writer
    popen = saver.subprocess.Popen

    class Popen(popen):
        def __init__(self, command, *positional, **named):
            super().__init__([__spec__.name if part == WRITER else part for part in command], *positional, **named)

    saver.subprocess.Popen = Popen
    points = Points()
    if at.get("rank") == int(os.environ["RANK"]) and at.get("phase") == "copying":
        points.at = {"folder": str(folder), **at}
    from zaya_plugin.hosts import saved_state

    save = saved_state.SavedState.save

    def saved(self, *what):
        """Wait for the save before: on a busy machine it would be left out, and the points would be others."""
        self.saver.wait()
        self.saver.agreed_state = self.saver.state
        save(self, *what)

    saved_state.SavedState.save = saved
    start, saves = saver.Staging.start, 0

    def started(self):
        nonlocal saves
        saves += 1
        points.begin("copying", saves)
        pairs, self._pairs = self._pairs, passing(points, self._pairs)
        start(self)
        self._pairs = pairs
        points.keep_counts()

    saver.Staging.start = started


def passing(points: Points, pairs: list):
    """Yield `pairs` with a point before each."""
    for pair in pairs:
        points("copy of a tensor")
        yield pair


if __name__ == "__main__":
    main(sys.argv[1:])
