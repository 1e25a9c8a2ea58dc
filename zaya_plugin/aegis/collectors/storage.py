# SPDX-License-Identifier: Apache-2.0
"""The file systems of the run: whether they answer, can be written, and have space.

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
from pathlib import Path

from zaya_plugin.aegis.collectors.runner import Collector
from zaya_plugin.aegis.evidence import Evidence

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
        self._state = ""  # the rule that was told last

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
            return self._tell(now - waited, "storage_stall", text, seconds=round(waited, 1))
        self._asked = None
        if self.hanging:
            self.hanging, self._state = False, ""
            text = f"{self.path} answers again after {waited:.0f} s"
            return [self.found(now, "storage_stall", text, path=str(self.path), seconds=waited, recovered=True)]
        if answer.get("errno") == errno.ENOENT:  # the run makes it with its first checkpoint
            self._state = ""
            return []
        if "errno" in answer:
            rule = RULES.get(answer["errno"], "eio")
            return self._tell(now, rule, f"{self.path}: {answer['text']}", errno=answer["errno"])
        if low(answer["free"], answer["total"]) or answer["inodes"] < LEAST_SHARE * answer["all_inodes"]:
            text = f"{self.path}: {answer['free'] / 2**30:.1f} GiB and {answer['inodes']} inodes are free"
            return self._tell(now, "disk_low", text, free=answer["free"], inodes=answer["inodes"])
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

    def _tell(self, at: float, rule: str, text: str, **values) -> list[Evidence]:
        before, self._state = self._state, rule
        return [] if before == rule else [self.found(at, rule, text, path=str(self.path), **values)]

    def close(self) -> None:
        """End the probe, without waiting for it."""
        if self._probe is not None:
            self._probe.kill()
            self._probe.poll()


def low(free: float, total: float) -> bool:
    """Whether so few bytes are free that the next checkpoints may not fit."""
    return free < min(LEAST_BYTES, LEAST_SHARE * total)
