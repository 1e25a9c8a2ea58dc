# SPDX-License-Identifier: Apache-2.0
"""The file systems of the run: whether they answer, can be written, and have space; and the run's checkpoints: each that
becomes complete, and one that is not complete long after it should be.

An access to a mount whose server is gone cannot be interrupted, not even by SIGKILL. So a process of its own asks, and
is left alone if it hangs.
"""

from __future__ import annotations

import errno
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from zaya_plugin.aegis.collectors.runner import Collector
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.checkpoint import manifest, on_disk

LATE = 1800.0  # seconds from the first file of a checkpoint; uploads to a slow file server take minutes
# For each line of its input: write, sync and remove a small file, and print what there is. It ends with its parent,
# whose end closes its input.
PROBE = """
import json, os, sys
folder, name = sys.argv[1:]
for line in sys.stdin:
    found = {}
    path = os.path.join(folder, name)
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            os.write(file, b"zaya" * 1024)
            os.fsync(file)
        finally:
            os.close(file)
            os.unlink(path)
        space = os.statvfs(folder)
        found = {"free": space.f_bavail * space.f_frsize, "total": space.f_blocks * space.f_frsize,
                 "inodes": space.f_favail, "all_inodes": space.f_files}
    except OSError as error:
        found = {"errno": error.errno, "text": error.strerror}
    print(json.dumps(found), flush=True)
"""
PATIENCE = 3.0  # seconds without an answer
LEAST_SHARE, LEAST_BYTES = 0.02, 50e9  # less than both is little: 2 % of a large file server are many checkpoints
RULES = {
    errno.ENOSPC: "enospc",
    errno.EDQUOT: "enospc",
    errno.EROFS: "erofs",
    errno.EIO: "eio",
    errno.EACCES: "eacces",
    errno.ESTALE: "stale_file",
    errno.ENOTCONN: "storage_stall",  # a file system in user space whose server has ended
}


class Storage(Collector):
    """Probes one directory of the run.

    Attributes:
        hanging: whether it does not answer at present.
    """

    source, interval, deadline = "storage", 1.0, 5.0

    def __init__(self, node: str, path: Path, patience: float = PATIENCE):
        super().__init__(node)
        self.path, self.patience = path, patience
        self.name = f"storage {path}"
        self.hanging = False
        self._probe: subprocess.Popen | None = None
        self._asked: float | None = None  # by the monotonic clock
        self._state = ""  # the rule that was reported last

    def poll(self, now: float) -> list[Evidence]:
        if self._probe is None or self._probe.poll() is not None:
            self._start()
        if self._asked is None:
            self._asked = time.monotonic()
            try:
                os.write(self._probe.stdin.fileno(), b"\n")
            except OSError:  # it was killed; the next poll starts another
                self._asked = None
                return []
        answer = self._answer()
        waited = time.monotonic() - self._asked
        if answer is None:
            if waited < self.patience or self.hanging:
                return []
            self.hanging = True
            text = f"{self.path} does not answer for {waited:.0f} s"
            return self._report(now - waited, "storage_stall", text, seconds=round(waited, 1))
        self._asked = None
        if self.hanging:
            self.hanging, self._state = False, ""
            text = f"{self.path} answers again after {waited:.0f} s"
            return [self.evidence(now, "storage_stall", text, path=str(self.path), seconds=waited, recovered=True)]
        if answer.get("errno") == errno.ENOENT:  # the run makes it with its first checkpoint
            self._state = ""
            return []
        if "errno" in answer:
            rule = RULES.get(answer["errno"], "eio")
            return self._report(now, rule, f"{self.path}: {answer['text']}", errno=answer["errno"])
        if low(answer["free"], answer["total"]) or answer["inodes"] < LEAST_SHARE * answer["all_inodes"]:
            text = f"{self.path}: {answer['free'] / 2**30:.1f} GiB and {answer['inodes']} inodes are free"
            return self._report(now, "disk_low", text, free=answer["free"], inodes=answer["inodes"])
        self._state = ""
        return []

    def _start(self) -> None:
        command = [sys.executable, "-I", "-S", "-c", PROBE, str(self.path), f".aegis-probe-{self.node}-{os.getpid()}"]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self._probe = subprocess.Popen(command, start_new_session=True, bufsize=0, **pipes)
        self._asked = None

    def _answer(self) -> dict | None:
        ready, _, _ = select.select([self._probe.stdout], [], [], 0.5)
        if not ready:
            return None
        try:
            return json.loads(os.read(self._probe.stdout.fileno(), 4096))
        except ValueError:  # it has ended
            return None

    def _report(self, at: float, rule: str, text: str, **values) -> list[Evidence]:
        before, self._state = self._state, rule
        return [] if before == rule else [self.evidence(at, rule, text, path=str(self.path), **values)]

    def close(self) -> None:
        """End the probe, without waiting for it."""
        if self._probe is not None:
            self._probe.kill()
            self._probe.poll()


def low(free: float, total: float) -> bool:
    """Whether so few bytes are free that the next checkpoints may not fit."""
    return free < min(LEAST_BYTES, LEAST_SHARE * total)


class Checkpoints(Collector):
    """Looks for manifests. One agent of a run does that, since all see the same directory.

    stalled: whether storage does not answer; the directory is then left alone.
    """

    name, source, interval, deadline = "checkpoints", "checkpoint", 2.0, 30.0

    def __init__(self, node: str, directory: Path, stalled: Callable[[], bool] = lambda: False, late: float = LATE):
        super().__init__(node)
        self.directory, self.stalled, self.late = directory, stalled, late
        self._known: set[int] | None = None
        self._begun: dict[str, float] = {}
        self._reported: set[str] = set()

    def poll(self, now: float) -> list[Evidence]:
        if self.stalled():
            return []
        complete = {step for step in on_disk.iterations(self.directory) if self._is_complete(step)}
        new, first = complete - (self._known or set()), self._known is None
        self._known = complete
        evidence = [self._saved(step, now) for step in sorted(new) if not first]
        return evidence + self._late(now)

    def _is_complete(self, step: int) -> bool:
        return bool(self._known and step in self._known) or (self._folder(step) / manifest.NAME).is_file()

    def _folder(self, step: int) -> Path:
        return on_disk.folder(self.directory, step)

    def _saved(self, step: int, now: float) -> Evidence:
        wrong = manifest.problems(self._folder(step))
        if wrong:
            return self.evidence(now, "ckpt_broken", f"checkpoint of step {step}: {'; '.join(wrong)}", step=step)
        return self.evidence(now, "checkpoint_saved", f"checkpoint of step {step} is complete", step=step)

    def _late(self, now: float) -> list[Evidence]:
        try:
            names = [name for name in os.listdir(self.directory) if name.endswith(manifest.UNFINISHED)]
        except OSError:
            names = []
        self._begun = {name: self._begun.get(name, now) for name in names}
        evidence = []
        for name, begun in self._begun.items():
            if now - begun > self.late and name not in self._reported:
                self._reported.add(name)
                text = f"{name} is not complete after {now - begun:.0f} s"
                evidence.append(self.evidence(now, "ckpt_late", text, seconds=now - begun))
        return evidence
