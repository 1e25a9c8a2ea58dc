# SPDX-License-Identifier: Apache-2.0
"""Bounds of processor time, which hold on slower machines too."""

import re
import time
from functools import cache

USUAL = 0.015  # seconds of `work` on the machine on which the bounds were set


@cache
def allowed(seconds: float) -> float:
    """Return the processor time that this machine may take for what takes `seconds` on the usual one."""
    return seconds * max(1.0, min(work() for _ in range(3)) / USUAL)


def work() -> float:
    """Return the seconds of the searches of one pattern."""
    began = time.process_time()
    for number in range(20_000):
        re.search(
            r"error (\d+) of [a-z]+", f"rank {number}: a line of a log without an end, error {number} of {number}"
        )
    return time.process_time() - began
