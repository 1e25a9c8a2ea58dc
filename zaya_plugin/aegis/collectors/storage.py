# SPDX-License-Identifier: Apache-2.0
"""The file systems of the run: whether they answer, can be written, and have space."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from zaya_plugin.aegis.collectors.runner import Collector
from zaya_plugin.aegis.evidence import Evidence
from zaya_plugin.ground.storage_probe import StorageProbe

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
        self._probe: StorageProbe | None = None
        self._asked: float | None = None  # by the monotonic clock
        self._state = ""  # the rule that was told last

    def poll(self, now: float) -> list[Evidence]:
        if self._probe is None or self._probe.process.poll() is not None:
            self._probe = StorageProbe(self.path, "write", f".aegis-probe-{self.node}-{os.getpid()}")
            self._asked = None
        if self._asked is None:
            if not self._probe.ask():  # the next poll starts another
                return []
            self._asked = time.monotonic()
        answer = self._probe.answer(0.5)
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

    def _tell(self, at: float, rule: str, text: str, **values) -> list[Evidence]:
        before, self._state = self._state, rule
        return [] if before == rule else [self.found(at, rule, text, path=str(self.path), **values)]

    def close(self) -> None:
        """End the probe, without waiting for it."""
        if self._probe is not None:
            self._probe.close()


def low(free: float, total: float) -> bool:
    """Whether so few bytes are free that the next checkpoints may not fit."""
    return free < min(LEAST_BYTES, LEAST_SHARE * total)
