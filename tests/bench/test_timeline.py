# SPDX-License-Identifier: Apache-2.0
"""Test the assignment of moments to parts for activities that overlap on several streams."""

import random

import pytest

from zaya_plugin.bench.attribution import Activity, resolve


def activity(part, start, end, backward=False, communicates=False, name=None):
    return Activity(name or part, float(start), float(end), part, backward, communicates)


def test_moments_of_overlapping_streams():
    found = resolve(
        [
            activity("experts", 10, 30),
            activity("experts", 30, 40, backward=True),
            activity("norms", 20, 30),  # at once with the experts: each gets half of ten
            activity("other", 25, 70, communicates=True, name="nccl"),
            activity("other", 60, 80, communicates=True, name="nccl"),
            activity("head", 50, 55),
        ],
        0.0,
        100.0,
    )
    assert found.parts == {
        "experts": (15.0, 10.0),
        "norms": (5.0, 0.0),
        "head": (5.0, 0.0),
        "communication": (35.0, 0.0),  # 40-50 and 55-80
        "idle": (30.0, 0.0),  # 0-10 and 80-100
    }
    assert found.hidden_communication == 20.0  # 25-40 and 50-55
    assert found.names["communication", "nccl"] == (2, 65.0) and found.names["experts", "experts"] == (2, 30.0)


def test_a_step_without_anything_is_idle():
    found = resolve([], 3.0, 5.0)
    assert found.parts == {"idle": (2.0, 0.0)}


@pytest.mark.parametrize("seed", range(5))
def test_moments_are_those_of_a_count_at_every_microsecond(seed):
    """Times are integers, so every microsecond has one kind; the count shares no code with the sweep."""
    draw = random.Random(seed)
    activities = []
    for _ in range(40):
        start = draw.randrange(0, 190)
        communicates = draw.random() < 0.3
        part, backward = draw.choice(("experts", "norms", "head")), draw.random() < 0.5
        activities.append(activity(part, start, start + draw.randrange(0, 11), backward, communicates))
    expected: dict = {}
    for moment in range(200):
        here = [a for a in activities if a.start <= moment < a.end]
        computing = [(a.part, a.backward) for a in here if not a.communicates]
        for key in computing or [("communication" if here else "idle", False)]:
            expected[key] = expected.get(key, 0.0) + 1 / (len(computing) or 1)
    found = resolve(activities, 0.0, 200.0)
    got = {(part, bool(i)): time for part, times in found.parts.items() for i, time in enumerate(times) if time}
    assert got == pytest.approx(expected) and sum(got.values()) == pytest.approx(200.0)
