# SPDX-License-Identifier: Apache-2.0
"""The steps of all ranks, from their heartbeats: when the last one was made, and which ranks are slower than others."""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

from zaya_plugin.aegis.evidence import Evidence, say
from zaya_plugin.aegis.record import Record

PROGRESS_SECONDS = 60.0  # between two lines of progress in the journal
# A rank is slow if it needs this many times its peers' median, for so many steps and seconds; heartbeats come every 2 s.
SLOW_FACTOR, SLOW_STEPS, SLOW_SECONDS = 1.5, 5, 6.0


class Steps:
    """stepped: when the last step was seen. slowest: seconds of the slowest of late."""

    def __init__(self, record: Record):
        self.record, self.cluster = record, record.cluster
        self._next_progress = 0.0
        self.begin_attempt()

    def begin_attempt(self) -> None:
        self.slowest, self.stepped = 0.0, time.time()
        self.origin: int | None = None  # the step that ranks without a step of their own continue from
        self._slow: dict[int, tuple[int, float]] = {}  # rank -> the step and the time from which on it is slow

    def follow(self, beats: list[dict[str, Any]]) -> bool:
        """Take note of steps, and return whether there is a new one; the nodes' collectors look for their absence."""
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
            self.note_last()  # of the stage before
        self.stepped, self.slowest = time.time(), max(0.98 * self.slowest, seconds)
        values = {"stage": stage} if stage else {}
        if self.cluster.first_step is None:
            self.record.note("first_step", step=step, **values, **self._continued())
            self._check_resumed(step)
        elif begins:
            self.record.note("progress", step=step, step_seconds=round(seconds, 4), **values, **self._continued())
        elif time.monotonic() > self._next_progress:
            self._next_progress = time.monotonic() + PROGRESS_SECONDS
            self.record.note("progress", step=step, step_seconds=round(seconds, 4), **values)
        else:
            self.cluster.apply({"kind": "progress", "step": step, "step_seconds": seconds, **values})
        return True

    def note_last(self) -> None:
        """Write down the last step, and when it was seen: that may be long ago, as in a hang."""
        if self.cluster.step is None:
            return
        seconds = round(self.cluster.step_seconds, 4)
        stage = {"stage": self.cluster.stage_name} if self.cluster.stages and self.cluster.stage_name else {}
        self.record.note("progress", step=self.cluster.step, step_seconds=seconds, at=self.stepped, **stage)

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

    def _continued(self) -> dict[str, int]:
        """Return the step that the ranks continue from, where they were heard before their first step."""
        origin, self.origin = self.origin, None
        return {} if origin is None else {"after": origin}

    def _check_resumed(self, step: int) -> None:
        expected = self.cluster.resume_step
        if expected is not None and not expected < step <= expected + 1 + int(2 * 2.0 / max(self.slowest, 0.01)):
            text = f"training goes on at step {step}, the newest checkpoint is of step {expected}"
            say(f"WARNING: {text}")
            self.record.note("symptom", evidence=Evidence(time.time(), "", "agent", text).to_json())


def slow_ranks(busy: Mapping[int, float]) -> dict[int, float]:
    """Return the ranks that compute more than SLOW_FACTOR times as long as the median of the others, with the factor.

    busy: seconds of one step until a rank's own gradients are there.
    """
    factors = {}
    for rank, seconds in busy.items():
        others = [value for other, value in busy.items() if other != rank]
        if others and seconds > SLOW_FACTOR * median(others) > 0:
            factors[rank] = seconds / median(others)
    return factors
