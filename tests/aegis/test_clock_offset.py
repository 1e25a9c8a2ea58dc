# SPDX-License-Identifier: Apache-2.0
"""The offset between two clocks, one of which may be set."""

import pytest

from zaya_plugin.aegis.clock_offset import ClockOffset


def test_a_clock_that_is_set_is_noticed_at_the_next_answer():
    clock = ClockOffset()
    for now, trip in ((1000.0, 0.002), (1002.0, 0.001), (1004.0, 0.004)):
        clock.measure(now, now - trip, now - trip / 2 + 5.0)  # the other clock is 5 s ahead
    assert clock.offset == pytest.approx(5.0, abs=1e-3)
    clock.measure(1006.0, 990.0, 1006.0)  # an answer that took 16 s says nothing
    assert clock.offset == pytest.approx(5.0, abs=1e-3)
    now = 1008.0 + 3600.0  # an hour ahead all at once
    clock.measure(now, now - 0.004, 1008.0 - 0.002 + 5.0)
    assert clock.offset == pytest.approx(5.0 - 3600.0, abs=1e-2)
