# SPDX-License-Identifier: Apache-2.0
"""The memory of the decision maker: the journal, and the state of the run that follows from it. After a crash of the
decision maker, or a new start of the job, it is read from there.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

from zaya_plugin import __version__
from zaya_plugin.aegis import slurm
from zaya_plugin.aegis.cluster import OUT, Cluster
from zaya_plugin.aegis.evidence import say
from zaya_plugin.aegis.journal import Journal, read, without_secrets_in
from zaya_plugin.aegis.settings import Settings, is_train
from zaya_plugin.checkpoint import places
from zaya_plugin.config.run_directory import COMPLETE

FLUSH_SECONDS = 2.0  # between two tries to write lines of the journal for which the disk had no room


class Record:
    """cluster: the state of the run. goes_on: whether an attempt may be running, or a decision waits to be carried out."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.cluster = Cluster(
            wanted=settings.nodes,
            sizes=settings.sizes,
            group=settings.group,
            restarts=settings.restarts,
            requeue=settings.requeue,
            stages=not is_train(settings.command),
        )
        self.cluster.replay(read(settings.journal) if settings.journal.exists() else ())
        self.journal = Journal(settings.journal)
        self._next_flush = 0.0
        command = without_secrets_in({"command": list(settings.command)})["command"]  # as the journal has it
        continued = self.cluster.begun and not self.cluster.ended and self.cluster.command == command
        if not continued:
            self.note(
                "begin",
                command=list(settings.command),
                nodes=settings.nodes,
                spares=settings.spares,
                ranks_per_node=settings.ranks_per_node,
                version=__version__,
            )
        for node in settings.exclude:
            self.note("node", node=node, state=OUT, reason="--exclude")
        self.note("decider", pid=os.getpid(), reason="started again from the journal" if continued else "start")
        pending = self.cluster.pending or {}
        if pending.get("action") == "requeue" and pending.get("start") != slurm.start_of_job():
            self.cluster.pending = None  # SLURM has carried it out
        begun = continued and self.cluster.generation > 0
        self.goes_on = begun and (self.cluster.running or self.cluster.pending is not None)

    def note(self, kind: str, **values: Any) -> None:
        """Write a line into the journal and apply it."""
        self.cluster.apply(self.journal.write(kind, self.cluster.generation, **values))

    def note_alerts(self, done: list[tuple[str, dict[str, str]]]) -> None:
        """Write down how alerts were delivered; one that had nowhere to go is no news."""
        for text, delivered in done:
            if delivered:
                self.note("alert", text=text, delivered=delivered)

    def look_for_checkpoints(self, answers: bool) -> None:
        """Write down checkpoints that are new. A folder that has its name and a manifest is complete.

        answers: whether the file server does; else it would hold this process too.
        """
        folder = self.settings.checkpoints
        if folder is None or not answers:
            return
        with contextlib.suppress(OSError):
            place = places.at(folder)
            steps = {
                int(match[1])
                for name in place.list(sizes=False)
                if (match := COMPLETE.fullmatch(name)) and places.exists(place / name / places.MANIFEST)
            }
            self.cluster.checkpoints = [step for step in self.cluster.checkpoints if step in steps]
            for step in sorted(steps - set(self.cluster.checkpoints)):
                self.note("checkpoint", step=step)

    def put_aside(self, to_step: int) -> None:
        """Give the checkpoints after `to_step` names that no load finds; nothing is deleted."""
        from zaya_plugin.checkpoint import on_disk

        for aside in on_disk.put_aside_from(Path(self.settings.checkpoints), to_step + 1):
            say(f"a checkpoint after step {to_step} is put aside: {aside.name}")

    def flush_if_due(self) -> None:
        """Try again to write lines for which the disk had no room."""
        if self.journal.left and time.monotonic() > self._next_flush:
            self._next_flush = time.monotonic() + FLUSH_SECONDS
            self.journal.flush()
