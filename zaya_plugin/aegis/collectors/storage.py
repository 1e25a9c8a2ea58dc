# SPDX-License-Identifier: Apache-2.0
"""The file systems of the run: whether they answer, can be written, and have space; and the run's checkpoints: each
that becomes complete, and one that is not complete long after it should be.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path

from zaya_plugin.aegis.collectors.runner import Collector
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.checkpoint import manifest, on_disk, places
from zaya_plugin.ground.storage_probe import StorageProbe

LATE = 1800.0  # seconds from the first file of a checkpoint; uploads to a slow file server take minutes
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
        self._state = ""  # the rule that was reported last

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

    def _report(self, at: float, rule: str, text: str, **values) -> list[Evidence]:
        before, self._state = self._state, rule
        return [] if before == rule else [self.evidence(at, rule, text, path=str(self.path), **values)]

    def close(self) -> None:
        """End the probe, without waiting for it."""
        if self._probe is not None:
            self._probe.close()


def low(free: float, total: float) -> bool:
    """Whether so few bytes are free that the next checkpoints may not fit."""
    return free < min(LEAST_BYTES, LEAST_SHARE * total)


class Checkpoints(Collector):
    """Looks for manifests in the directory of the run's checkpoints, as the agent of each node does.

    stalled: whether storage does not answer; the directory is then left alone.
    """

    name, source, interval, deadline = "checkpoints", "checkpoint", 2.0, 30.0

    def __init__(self, node: str, directory: Path, stalled: Callable[[], bool] = lambda: False, late: float = LATE):
        super().__init__(node)
        self.directory, self.stalled, self.late = places.at(directory), stalled, late
        self._known: set[int] | None = None
        self._begun: dict[str, float] = {}
        self._reported: set[str] = set()

    def poll(self, now: float) -> list[Evidence]:
        if self.stalled():
            return []
        is_first, known = self._known is None, self._known or set()
        self._known = {
            step
            for step in on_disk.iterations(self.directory)
            if step in known or on_disk.has_manifest(on_disk.folder(self.directory, step))
        }
        evidence = [] if is_first else [self._saved(step, now) for step in sorted(self._known - known)]
        return evidence + self._late(now)

    def _saved(self, step: int, now: float) -> Evidence:
        wrong = manifest.problems(on_disk.folder(self.directory, step))
        if wrong:
            return self.evidence(now, "ckpt_broken", f"checkpoint of step {step}: {'; '.join(wrong)}", step=step)
        return self.evidence(now, "checkpoint_saved", f"checkpoint of step {step} is complete", step=step)

    def _late(self, now: float) -> list[Evidence]:
        try:
            names = [name for name in places.names(self.directory) if name.endswith(manifest.UNFINISHED)]
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
