# SPDX-License-Identifier: Apache-2.0
"""Coefficients of the Newton-Schulz iteration X <- a X + (b A + c A^2) X, A = X X^T.

Names are those of Megatron's `muon_coefficient_type` and of emerging_optimizers 0.3.0 (`_COEFFICIENT_SETS`), so that a
recipe's value means the same in all three; a set that they do not have gets a name that they do not have. "simple" is
Keller Jordan's triple (https://kellerjordan.github.io/posts/muon/, torch.optim.Muon's default), "quintic" is NOT that
one but the five triples of modded-nanogpt (https://leloykun.github.io/ponder/muon-opt-coeffs/).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from hip_ops.errors import mistake

Triple = tuple[float, float, float]

# The recipe's `optim.muon_coefficients` (zaya_plugin/config/schema.py) lists the same names; a test compares them.
# name: (triples, continuation after the last one: "cycle" starts over, "repeat_last" repeats it)
COEFFICIENT_SETS: dict[str, tuple[tuple[Triple, ...], str]] = {
    "simple": (((3.4445, -4.7750, 2.0315),), "cycle"),
    "quintic": (
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        "cycle",
    ),
    # arXiv 2505.16932. The published polynomials p(x) are used as p(x / 1.01), the paper's safety factor (Algorithm 1):
    # a / 1.01, b / 1.01^3, c / 1.01^5; the last one, of the limit x (15 - 10 x^2 + 3 x^4) / 8, is not scaled.
    "polar_express": (
        (
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        "repeat_last",
    ),
}


def coefficient_triples(coefficients: str | Sequence[Sequence[float]], steps: int) -> tuple[Triple, ...]:
    """Return the triples (a, b, c) of `steps` steps. coefficients: a name of COEFFICIENT_SETS, or triples, which are
    used in a cycle.

    Raises ValueError for an unknown name, triples that are not three finite numbers each, an empty list, and steps < 0.
    """
    if not isinstance(steps, int) or steps < 0:
        raise mistake("hip_ops.newton_schulz", f"steps is {steps!r}", "a whole number, 0 or more")
    follow = "cycle"
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENT_SETS:
            allowed = f"{', '.join(COEFFICIENT_SETS)} or a list of triples (a, b, c)"
            raise mistake("hip_ops.newton_schulz", f"coefficients is {coefficients!r}", allowed)
        triples, follow = COEFFICIENT_SETS[coefficients]
    else:
        triples = tuple(tuple(float(v) for v in triple) for triple in coefficients)
        if not triples or any(len(triple) != 3 or not all(map(math.isfinite, triple)) for triple in triples):
            allowed = "one or more triples (a, b, c) of finite numbers"
            raise mistake("hip_ops.newton_schulz", f"coefficients is {coefficients!r}", allowed)
    last = len(triples) - 1
    return tuple(triples[i % len(triples) if follow == "cycle" else min(i, last)] for i in range(steps))
