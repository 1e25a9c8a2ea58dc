# SPDX-License-Identifier: Apache-2.0
"""How far the decision maker's clock is ahead of this node's, from the answers to heartbeats."""

from __future__ import annotations


class ClockOffset:
    """offset: seconds to add to a time of this node. trip: of the answer that it was taken from."""

    def __init__(self) -> None:
        self.offset, self.trip = 0.0, float("inf")

    def measure(self, now: float, sent: float, theirs: float) -> None:
        """Take the offset from one answer, which arrived `now`; the quickest answer knows it best."""
        trip = now - sent
        if trip < 0:  # this clock was set back meanwhile
            return
        offset = theirs + trip / 2 - now
        if trip <= self.trip or abs(offset - self.offset) > trip + self.trip:  # further off: a clock was set
            self.trip, self.offset = trip, offset
        self.trip *= 1.05  # clocks drift: an old measurement gives way to a slightly worse new one
