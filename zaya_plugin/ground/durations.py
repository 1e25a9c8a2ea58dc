# SPDX-License-Identifier: Apache-2.0
"""Durations for a person."""

import math


def duration(seconds: float | None) -> str:
    """Return `seconds` for a person, "-" for None and what is not finite."""
    if seconds is None or not math.isfinite(seconds):
        return "-"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d} min" if hours < 100 else f"{hours // 24} d {hours % 24:02d} h"
