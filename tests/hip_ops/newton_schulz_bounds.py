# SPDX-License-Identifier: Apache-2.0
"""The exact bounds of the singular values after a Newton-Schulz iteration."""

import math
from collections.abc import Sequence

from hip_ops.ops.newton_schulz.plan import Triple


def singular_value_interval(triples: Sequence[Triple], smallest: float, largest: float = 1.0) -> tuple[float, float]:
    """Returns the exact image of the interval [smallest, largest] of singular values of the normalised matrix under the
    iteration.

    Singular vectors stay and each singular value s becomes a s + b s^3 + c s^5. The image of an interval under a
    polynomial is the interval between its extremes there: at the ends and at the critical points, a + 3 b s^2 + 5 c s^4
    = 0. So the bounds are attained, not estimated.
    """
    low, high = smallest, largest
    for a, b, c in triples:
        points = [low, high]
        if c == 0.0:
            squares = [-a / (3 * b)] if b else []
        else:
            root = 9 * b * b - 20 * a * c
            squares = [(-3 * b + sign * math.sqrt(root)) / (10 * c) for sign in (1, -1)] if root >= 0 else []
        points += [math.sqrt(s) for s in squares if s > 0 and low < math.sqrt(s) < high]
        values = [a * s + b * s**3 + c * s**5 for s in points]
        low, high = min(values), max(values)
    return low, high
