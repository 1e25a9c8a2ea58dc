# SPDX-License-Identifier: Apache-2.0
"""The memory of the decider: the journal and the state of the run that follows from it (Record), and the steps of all
ranks from their heartbeats (Steps).

After a crash of the decider, or a new start of the job, the state is read from the journal.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from zaya_plugin import __version__
from zaya_plugin.aegis import slurm
from zaya_plugin.aegis.diagnose.cluster import Cluster
from zaya_plugin.aegis.diagnose.evidence import Evidence, print_line
from zaya_plugin.aegis.journal import Journal, read, without_secrets_in
from zaya_plugin.aegis.protocol import (
    BEAT_SECONDS,
    OUT,
    Alert,
    Begin,
    Checkpoint,
    DeciderStart,
    FirstStep,
    NodeChange,
    Progress,
    Row,
    Symptom,
)
from zaya_plugin.aegis.settings import Settings, is_train
from zaya_plugin.checkpoint import places
from zaya_plugin.config.run_directory import COMPLETE, MANIFEST

FLUSH_SECONDS = 2.0  # between two tries to write lines of the journal for which the disk had no room
PROGRESS_SECONDS = 60.0  # between two lines of progress in the journal
# A rank is slow if it needs this many times its peers' median, for this number of steps and seconds.
SLOW_FACTOR, SLOW_STEPS, SLOW_SECONDS = 1.5, 5, 6.0


class Record:
    """cluster: the state of the run. has_unfinished_attempt: whether an attempt may be running, or a decision is to be
    carried out.
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.cluster = Cluster(
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
            words = list(settings.command)
            self.write(Begin(words, settings.nodes, settings.spares, settings.ranks_per_node, __version__))
        for node in settings.exclude:
            self.write(NodeChange(node, OUT, "--exclude"))
        self.write(DeciderStart(os.getpid(), "started again from the journal" if continued else "start"))
        pending = self.cluster.pending
        if pending is not None and pending.action == "requeue" and pending.start != slurm.start_of_job():
            self.cluster.pending = None  # SLURM has carried it out
        begun = continued and self.cluster.generation > 0
        self.has_unfinished_attempt = begun and (self.cluster.running or self.cluster.pending is not None)

    def write(self, row: Row) -> None:
        """Write a row into the journal and apply it."""
        self.journal.write(row, self.cluster.generation)
        self.cluster.apply(row)

    def write_alerts(self, done: list[tuple[str, dict[str, str]]]) -> None:
        """Write how alerts were delivered; one without a channel needs no row."""
        for text, delivered in done:
            if delivered:
                self.write(Alert(text, delivered))

    def write_checkpoints(self, storage_answers: bool) -> None:
        """Write a row for each checkpoint that is new. A folder that has its name and a manifest is complete.

        storage_answers: whether the file server does; else it would hold this process too.
        """
        folder = self.settings.checkpoints
        if folder is None or not storage_answers:
            return
        place, steps = places.at(folder), set()
        try:
            names = place.list(sizes=False)
        except OSError:
            return
        for name in names:
            with contextlib.suppress(OSError):  # of one checkpoint
                if (match := COMPLETE.fullmatch(name)) and places.exists(place / name / MANIFEST):
                    steps.add(int(match[1]))
        self.cluster.checkpoints = [step for step in self.cluster.checkpoints if step in steps]
        for step in sorted(steps - set(self.cluster.checkpoints)):
            self.write(Checkpoint(step))

    def put_aside(self, to_step: int) -> None:
        """Rename the checkpoints after `to_step`, so that no start loads them; nothing is deleted."""
        from zaya_plugin.checkpoint import on_disk

        for aside in on_disk.put_aside_from(Path(self.settings.checkpoints), to_step + 1):
            print_line(f"a checkpoint after step {to_step} is put aside: {aside.name}")

    def flush_if_due(self) -> None:
        """Try again to write lines for which the disk had no room."""
        if self.journal.waiting and time.monotonic() > self._next_flush:
            self._next_flush = time.monotonic() + FLUSH_SECONDS
            self.journal.flush()


class Steps:
    """stepped: the time of the last step. slowest: seconds of the slowest recent step."""

    def __init__(self, record: Record):
        self.record, self.cluster = record, record.cluster
        self._next_progress = 0.0
        self.begin_attempt()

    def begin_attempt(self) -> None:
        self.slowest, self.stepped = 0.0, time.time()
        self.origin: int | None = None  # the step that ranks without a step of their own continue from
        self._slow: dict[int, tuple[int, float]] = {}  # rank -> the step and the time from which on it is slow

    def follow(self, beats: list[dict[str, Any]]) -> bool:
        """Write rows of the steps in the heartbeats of all ranks, and return whether there is a new step."""
        names = {beat.get("stage") for beat in beats} if self.cluster.stages else {None}
        if len(names) != 1 or not beats:  # the ranks of two stages
            return False
        step, stage = min(beat["step"] for beat in beats), next(iter(names))
        if any(beat.get("step_seconds") is None for beat in beats):  # a rank has made no step yet
            if all(beat["phase"] in ("warm_up", "train") for beat in beats):
                self.origin = step
            return False
        seconds = max(float(beat["step_seconds"]) for beat in beats)
        begins = self.cluster.begins_stage(stage, step)
        if not begins and step <= (self.cluster.step or self.cluster.resume_step or 0):
            return False
        if begins and self.cluster.step is not None:
            self.write_last()  # of the stage before
        self.stepped, self.slowest = time.time(), max(0.98 * self.slowest, seconds)
        row = Progress(step, round(seconds, 4), stage=stage or None)
        if self.cluster.first_step is None:
            self.record.write(FirstStep(step, stage=stage or None, after=self._continued()))
            self._check_resumed(step)
        elif begins:
            row.after = self._continued()
            self.record.write(row)
        elif time.monotonic() > self._next_progress:
            self._next_progress = time.monotonic() + PROGRESS_SECONDS
            self.record.write(row)
        else:
            self.cluster.apply(row)
        return True

    def write_last(self) -> None:
        """Write the last step and its time, which may be long ago, as in a hang."""
        if self.cluster.step is None:
            return
        stage = self.cluster.stage_name if self.cluster.stages else None
        seconds = round(self.cluster.step_seconds, 4)
        self.record.write(Progress(self.cluster.step, seconds, at=self.stepped, stage=stage))

    def slow(self, beats: Mapping[int, dict[str, Any]], ranks_per_node: int) -> list[Evidence]:
        """Return evidence of the ranks that compute longer than their peers on all nodes."""
        slow = slow_ranks({rank: beat["busy_seconds"] for rank, beat in beats.items() if beat.get("busy_seconds")})
        for rank in self._slow.keys() - slow.keys():
            del self._slow[rank]
        evidence = []
        for rank, factor in slow.items():
            step, now = beats[rank]["step"], time.monotonic()
            first, since = self._slow.setdefault(rank, (step, now))
            if step - first >= SLOW_STEPS and now - since >= SLOW_SECONDS:
                busy, node = beats[rank]["busy_seconds"], self.cluster.node_of(rank, ranks_per_node)
                text = f"rank {rank} computes for {busy:.3g} s a step, {factor:.1f} times its peers' median"
                values = {"factor": round(factor, 2), "busy_seconds": busy}
                evidence.append(Evidence(time.time(), node, "agent", text, rank, "slow_rank", values))
        return evidence

    def _continued(self) -> int | None:
        """Return the step that the ranks continue from, if they sent heartbeats before their first step."""
        origin, self.origin = self.origin, None
        return origin

    def _check_resumed(self, step: int) -> None:
        expected = self.cluster.resume_step
        unseen = int(2 * BEAT_SECONDS / max(self.slowest, 0.01))  # steps that ranks make in two heartbeats
        if expected is not None and not expected < step <= expected + 1 + unseen:
            text = f"training continues at step {step}, the newest checkpoint is of step {expected}"
            print_line(f"WARNING: {text}")
            self.record.write(Symptom(Evidence(time.time(), "", "agent", text)))


def slow_ranks(busy: Mapping[int, float]) -> dict[int, float]:
    """Return the ranks that compute more than SLOW_FACTOR times as long as the median of the others, with the factor.

    busy: seconds of one step until a rank's own gradients are complete.
    """
    factors = {}
    for rank, seconds in busy.items():
        others = [value for other, value in busy.items() if other != rank]
        if others and seconds > SLOW_FACTOR * median(others) > 0:
            factors[rank] = seconds / median(others)
    return factors
