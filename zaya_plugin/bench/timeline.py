# SPDX-License-Identifier: Apache-2.0
"""Every moment of a step to one part: activities that overlap are resolved on the time line, so that the parts add up to the step.

While something computes, the moment belongs to it, shared equally among the parts of several things that compute at once; while only
communication runs, to exposed communication; while nothing runs, to idle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from zaya_plugin.bench.attribution import Activity


@dataclass(frozen=True)
class Moments:
    """Microseconds: of a part as (forward, backward), of each activity's own duration by (part, name) as (count, sum)."""

    parts: dict[str, tuple[float, float]]
    names: dict[tuple[str, str], tuple[int, float]]
    hidden_communication: float


def resolve(activities: Iterable[Activity], start: float, end: float) -> Moments:
    """Shares out the time from `start` to `end`, between which all activities lie."""
    times: dict[tuple[str, bool], float] = {}
    names: dict[tuple[str, str], tuple[int, float]] = {}
    edges = []
    for activity in activities:
        assert start <= activity.start <= activity.end <= end, activity
        key = ("communication", False) if activity.communicates else (activity.part, activity.backward)
        edges += [(activity.start, 1, key), (activity.end, -1, key)]
        count, total = names.get((key[0], activity.name), (0, 0.0))
        names[key[0], activity.name] = count + activity.begins, total + activity.end - activity.start
    running: Counter = Counter()
    communicating, hidden, before = 0, 0.0, start
    for moment, change, key in (*sorted(edges, key=lambda edge: edge[:2]), (end, 0, None)):
        if (passed := moment - before) > 0:
            computing = sum(running.values())
            if computing:
                hidden += passed * (communicating > 0)
                for each, count in running.items():
                    times[each] = times.get(each, 0.0) + passed * count / computing
            else:
                alone = ("communication" if communicating else "idle", False)
                times[alone] = times.get(alone, 0.0) + passed
        before = moment
        if key is None:
            continue
        if key[0] == "communication":
            communicating += change
        else:
            running[key] += change
    parts: dict[str, tuple[float, float]] = {}
    for (part, backward), time in times.items():
        forward_time, backward_time = parts.get(part, (0.0, 0.0))
        parts[part] = (forward_time, backward_time + time) if backward else (forward_time + time, backward_time)
    return Moments(parts, names, hidden)
