# SPDX-License-Identifier: Apache-2.0
"""Durations for a person."""

from zaya_plugin.ground.durations import duration


def test_durations_are_read_at_a_glance():
    given = [None, 0.0, 3.25, 99.9, 100, 3599, 3600, 7260, 400 * 3600]
    expected = ["-", "0.0 s", "3.2 s", "99.9 s", "1 min 40 s", "59 min 59 s", "1 h 00 min", "2 h 01 min", "16 d 16 h"]
    assert [duration(each) for each in given] == expected
    assert duration(float("inf")) == duration(float("nan")) == "-"
