# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of the run: each that becomes complete, and one that is not complete long after it should be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from zaya_plugin.aegis.collectors.runner import Collector
from zaya_plugin.aegis.evidence import Evidence
from zaya_plugin.checkpoint import manifest, on_disk, places

LATE = 1800.0  # seconds from the first file of a checkpoint; uploads to a slow file server take minutes


class Checkpoints(Collector):
    """Looks for manifests. One agent of a run does that, since all see the same directory.

    stalled: whether storage does not answer; the directory is then left alone.
    """

    name, source, interval, deadline = "checkpoints", "checkpoint", 2.0, 30.0

    def __init__(self, node: str, directory: Path, stalled: Callable[[], bool] = lambda: False, late: float = LATE):
        super().__init__(node)
        self.directory, self.stalled, self.late = places.at(directory), stalled, late
        self._known: set[int] | None = None
        self._begun: dict[str, float] = {}
        self._told: set[str] = set()

    def poll(self, now: float) -> list[Evidence]:
        if self.stalled():
            return []
        complete = {step for step in on_disk.iterations(self.directory) if self._is_complete(step)}
        new, first = complete - (self._known or set()), self._known is None
        self._known = complete
        evidence = [self._saved(step, now) for step in sorted(new) if not first]
        return evidence + self._late(now)

    def _is_complete(self, step: int) -> bool:
        return bool(self._known and step in self._known) or on_disk.has_manifest(self._folder(step))

    def _folder(self, step: int) -> places.Place:
        return on_disk.folder(self.directory, step)

    def _saved(self, step: int, now: float) -> Evidence:
        wrong = manifest.problems(self._folder(step))
        if wrong:
            return self.found(now, "ckpt_broken", f"checkpoint of step {step}: {'; '.join(wrong)}", step=step)
        return self.found(now, "checkpoint_saved", f"checkpoint of step {step} is complete", step=step)

    def _late(self, now: float) -> list[Evidence]:
        try:
            names = [name for name in places.names(self.directory) if name.endswith(manifest.UNFINISHED)]
        except OSError:
            names = []
        self._begun = {name: self._begun.get(name, now) for name in names}
        evidence = []
        for name, begun in self._begun.items():
            if now - begun > self.late and name not in self._told:
                self._told.add(name)
                text = f"{name} is not complete after {now - begun:.0f} s"
                evidence.append(self.found(now, "ckpt_late", text, seconds=now - begun))
        return evidence
