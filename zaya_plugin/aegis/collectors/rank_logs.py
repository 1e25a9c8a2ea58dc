# SPDX-License-Identifier: Apache-2.0
"""The lines that the ranks of this node write to their logs. They carry no rule yet: the agent compares them."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from zaya_plugin.aegis.collectors.runner import Collector
from zaya_plugin.aegis.collectors.tail import Tail
from zaya_plugin.aegis.evidence import TEXT, Evidence, printable

# What glog (torch, gloo) and Python's logging write: E1122 10:00:00.123000, 2026-11-22 10:00:00,123. Torch's C++ side
# writes month * 100 + day, so August has one digit: E813.
GLOG = re.compile(r"\b[EWIF](?P<month>\d{1,2})(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)\.(?P<part>\d+)")
LOGGING = re.compile(r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)[ T](?P<clock>\d\d:\d\d:\d\d)[,.](?P<part>\d+)")
OLD = 300.0  # seconds; a line with an older stamp quotes another one


class RankLogs(Collector):
    """Reads the logs of this node's ranks.

    wanted: says of a line whether it is evidence; the others are dropped here, before they cost anything.
    """

    name, source, interval, deadline = "rank_logs", "rank", 0.25, 10.0

    def __init__(self, node: str, logs: Mapping[Path, int] | None = None, wanted: Callable[[str], bool] | None = None):
        super().__init__(node)
        self.wanted = wanted
        self._tails: list[tuple[Tail, int]] = []
        self.watch(logs or {})

    def watch(self, logs: Mapping[Path, int], from_end: bool = False) -> None:
        """Read these files from now on, path -> rank. from_end: leave out what they hold."""
        self._tails = [(Tail(path, from_end), rank) for path, rank in logs.items()]

    def poll(self, now: float) -> list[Evidence]:
        found = []
        for tail, rank in self._tails:
            for line in tail.lines():
                text = line.decode(errors="replace")
                if self.wanted is None or self.wanted(text):
                    short = text[:TEXT]
                    short = short if short.isprintable() else printable(short)
                    found.append(Evidence(stamp(text, now), self.node, self.source, short, rank))
        return found


def stamp(line: str, now: float) -> float:
    """Return the time that a line says it was written at, in the node's time zone; without one, `now`."""
    match = GLOG.search(line, 0, 100) or LOGGING.search(line, 0, 100)
    if match is None:
        return now
    year = match.groupdict().get("year") or time.localtime(now).tm_year
    try:
        written = time.strptime(f"{year}-{match['month']}-{match['day']} {match['clock']}", "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return now
    at = time.mktime(written) + float(f"0.{match['part']}")
    return at if now - OLD < at <= now + 1 else now
