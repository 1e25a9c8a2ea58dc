# SPDX-License-Identifier: Apache-2.0
"""Every moment of a step to one part: activities that overlap are resolved on the time line, so that the parts add up to the step.

While something computes, the moment belongs to it, shared equally among the parts of several things that compute at once; while only
communication runs, to exposed communication; while nothing runs, to idle.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass

from zaya_plugin.bench.attribution import Activity


@dataclass(frozen=True)
class Stretch:
    """Time in which nothing computes. before, after: what computed last and computes next, None at the step's ends; communication: names of what runs."""

    start: float
    end: float
    communicating: float
    before: Activity | None
    after: Activity | None
    communication: tuple[str, ...]


@dataclass(frozen=True)
class Moments:
    """Microseconds: of a part as (forward, backward), of each activity's own duration by (part, name) as (count, sum); stretches in their order."""

    parts: dict[str, tuple[float, float]]
    names: dict[tuple[str, str], tuple[int, float]]
    hidden_communication: float
    stretches: list[Stretch]


def resolve(activities: Iterable[Activity], start: float, end: float) -> Moments:
    """Shares out the time from `start` to `end`, between which all activities lie."""
    activities = list(activities)
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
    return Moments(parts, names, hidden, stretches(activities, start, end))


def stretches(activities: Iterable[Activity], start: float, end: float) -> list[Stretch]:
    """Where nothing computes between `start` and `end`."""
    computing = sorted(
        (each for each in activities if not each.communicates and each.end > each.start), key=lambda each: each.start
    )
    gaps, last, reached = [], None, start
    for each in (*computing, None):
        begins = end if each is None else each.start
        if begins > reached:
            gaps.append((reached, begins, last, each))
        if each is not None and each.end > reached:
            last, reached = each, each.end
    others = deque(sorted((each for each in activities if each.communicates), key=lambda each: each.start))
    found, running = [], []  # running: begun before the end of the gap, in the order of their starts
    for begins, ends, before, after in gaps:
        while others and others[0].start < ends:
            running.append(others.popleft())
        running = [each for each in running if each.end > begins]
        covered, until = 0.0, begins
        for each in running:
            covered += max(0.0, min(each.end, ends) - max(each.start, until))
            until = max(until, min(each.end, ends))
        found.append(Stretch(begins, ends, covered, before, after, tuple(dict.fromkeys(each.name for each in running))))
    return found
