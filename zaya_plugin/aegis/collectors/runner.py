# SPDX-License-Identifier: Apache-2.0
"""Polls each collector in a thread of its own, so that one that blocks does not stop the others."""

from __future__ import annotations

import queue
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from zaya_plugin.aegis.diagnose.evidence import Evidence, printable

MAX_EVIDENCE = 20_000  # pieces that wait for `drain`; further ones are dropped and counted


class Collector:
    """One source of evidence.

    Attributes:
        name: in evidence and documents.
        interval: seconds between two polls.
        deadline: seconds; a poll that takes longer is reported once as collector_late, and not waited for.
        source: of its evidence.
    """

    name, source = "", "counter"
    interval, deadline = 1.0, 10.0

    def __init__(self, node: str):
        self.node = node

    def poll(self, now: float) -> list[Evidence]:
        """Return what is new at `now`, in seconds since 1970; [] where the source is absent."""
        raise NotImplementedError

    def evidence(self, at: float, rule: str | None, text: str, rank: int | None = None, **values: Any) -> Evidence:
        """Return evidence of this node."""
        return Evidence(at, self.node, self.source, printable(text), rank, rule, values)


class Collectors:
    """Polls collectors until `close`. `drain` returns their evidence since the last call; it never waits."""

    def __init__(self, collectors: Sequence[Collector]):
        self.collectors = list(collectors)
        self._evidence: queue.Queue[Evidence] = queue.Queue(MAX_EVIDENCE)
        self._ended = threading.Event()
        self._busy: dict[str, float] = {}  # collector -> start of its poll (monotonic)
        self._late: set[str] = set()
        self._failed: set[str] = set()
        self._dropped = 0
        for collector in self.collectors:
            threading.Thread(
                target=self._run, args=(collector,), name=f"collector {collector.name}", daemon=True
            ).start()

    def _run(self, collector: Collector) -> None:
        while not self._ended.is_set():
            self._busy[collector.name] = time.monotonic()
            try:
                evidence = collector.poll(time.time())
            except Exception as error:  # a source in an unknown form must not end the watch over it
                evidence = []
                if collector.name not in self._failed:
                    self._failed.add(collector.name)
                    evidence = [self._about(collector, f"has failed: {type(error).__name__}: {error}")]
            self._busy.pop(collector.name, None)
            self._late.discard(collector.name)
            for item in evidence:
                self._put(item)
            self._ended.wait(collector.interval)

    def _about(self, collector: Collector, problem: str) -> Evidence:
        text, values = f"collector {collector.name} {problem}", {"collector": collector.name}
        return Evidence(time.time(), collector.node, "agent", printable(text), rule="collector_late", values=values)

    def _put(self, evidence: Evidence) -> None:
        try:
            self._evidence.put_nowait(evidence)
        except queue.Full:
            self._dropped += 1

    def drain(self) -> list[Evidence]:
        """Return the evidence since the last call, in its order."""
        for collector in self.collectors:
            begun = self._busy.get(collector.name)
            if begun is not None and time.monotonic() - begun > collector.deadline and collector.name not in self._late:
                self._late.add(collector.name)
                self._put(self._about(collector, f"does not answer for {collector.deadline:g} s"))
        evidence, dropped, self._dropped = [], self._dropped, 0
        if dropped:
            evidence.append(dropped_evidence(time.time(), self.collectors[0].node, dropped, "of collectors"))
        while True:
            try:
                evidence.append(self._evidence.get_nowait())
            except queue.Empty:
                return evidence

    def close(self) -> None:
        """Stop polling. A collector that blocks is left alone: its thread ends with the process."""
        self._ended.set()


def dropped_evidence(at: float, node: str, count: int, which: str) -> Evidence:
    """Return evidence that `count` pieces were dropped, because too many waited."""
    text = f"{count} pieces of evidence {which} were dropped, because too many waited"
    return Evidence(at, node, "agent", text, rule="collector_late", values={"dropped": count})


class Growth:
    """The growth of counters since they were last reported: only growth is evidence, a count alone may be years old."""

    def __init__(self) -> None:
        self._reported: dict[object, int] = {}

    def of(self, key: object, value: int, least: int = 1) -> int:
        """Return by how much a counter has grown, or 0 below `least`. The first value, and one that fell,
        is a start.
        """
        before = self._reported.setdefault(key, value)
        grown = value - before
        if grown < 0 or grown >= least:
            self._reported[key] = value
        return grown if grown >= least else 0


class Tool:
    """A program that is run again and again, and may hang in state D, where no signal ends it.

    It is then left alone, and not started again before it has ended.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._hanging: subprocess.Popen | None = None

    def output(self, *command: str) -> str | None:
        """Return what the program wrote, or None: it is absent, has failed, or did not end in time."""
        if self._hanging is not None and self._hanging.poll() is None:
            return None
        pipes = dict(stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            program = subprocess.Popen(command, start_new_session=True, text=True, errors="replace", **pipes)
        except OSError:
            return None
        try:
            text, _ = program.communicate(timeout=self.seconds)
        except subprocess.TimeoutExpired:
            program.kill()
            self._hanging = program
            program.stdout.close()
            raise TimeoutError(f"{command[0]} does not end in {self.seconds:g} s") from None
        return text if program.returncode == 0 else None
