# SPDX-License-Identifier: Apache-2.0
"""Evidence by guards inside the run before a rank ended: rank<N>.guard.json (zaya_plugin.training.heartbeat.guard)."""

from __future__ import annotations

from pathlib import Path

from zaya_plugin.aegis.collectors.runner import Collector
from zaya_plugin.aegis.evidence import Evidence, parsed, printable


class Guards(Collector):
    """Turns each guard file into one piece of evidence; its kind is the name of the rule: loss_spike, non_finite."""

    name, source, interval, deadline = "guards", "rank", 0.5, 5.0

    def __init__(self, node: str, folder: Path | None = None):
        super().__init__(node)
        self.watch(folder)

    def watch(self, folder: Path | None) -> None:
        """Follow the ranks of a new attempt."""
        self._seen: set[Path] = set()
        self._folder = folder

    def poll(self, now: float) -> list[Evidence]:
        evidence = []
        for path in sorted(self._folder.glob("rank*.guard.json")) if self._folder is not None else ():
            if path in self._seen:
                continue
            try:
                values = dict(parsed(path.read_text()))
                at, kind, text, rank = (values.pop(name) for name in ("time", "kind", "text", "rank"))
                at, rank = float(at), int(rank)
            except (OSError, ValueError, TypeError, KeyError, OverflowError):
                continue
            self._seen.add(path)
            evidence.append(Evidence(at, self.node, self.source, printable(str(text)), rank, str(kind), values))
        return evidence
