# SPDX-License-Identifier: Apache-2.0
"""Plans one Newton-Schulz iteration: its coefficients, the form, the restarts, and the powers of two that scale half
precision.

With X [n, m], n <= m, and the polynomial factors P_t = a_t I + b_t R + c_t R^2 of R = X X^T:

standard   X <- P X, with R = X X^T computed in every step: T (3 m/n + 1) n^3 FLOPs, where symmetric products
           cost half.
gram       all P_t commute with R, so Q <- Q P and R <- P R P need n x n products only, each of them symmetric, and X is
           read again at the end, X <- Q X (Dao-AILab, gram-newton-schulz): (4 T + 3 (m/n) - 3) n^3 FLOPs,
           and 3 (m/n - 1) n^3 more for every restart. For square matrices it saves nothing.

Restarts. R is known to about eps |R|, and a step multiplies that error, where R is small, by a_t^2: three steps of a =
3.4445 lift the rounding of half precision (2^-11) above R itself, so that Q is no longer a polynomial of R and can
overflow. A restart applies Q to X and computes R = X X^T of the result. No restart corrects the errors of the last
steps, so the last stretch has two steps and the ones before it three: `default_restarts`.
tests/hip_ops/test_newton_schulz_forms.py shows the error with and without.

Half precision. Entries of a normalised matrix are about (n m)^-1/2 and those of R about 1 / (n sqrt(m)): below 2^-14
half precision loses digits. X, R (and b R + c R^2) and Q are therefore stored multiplied by the powers of two below.
This is exact, and the factors of each product contain it. Bounds: entries of X are at most 1.21 and of R 1.21^2 (the
largest singular value that any of these sets makes), Q is at most the product of three a's (130), so all numbers stay
far below 65504.

Coefficients. Names are those of Megatron's `muon_coefficient_type` and of emerging_optimizers 0.3.0
(`_COEFFICIENT_SETS`), so that a recipe's value means the same in all three; a set of this project alone has a name that
they do not use. "simple" is Keller Jordan's triple (https://kellerjordan.github.io/posts/muon/, torch.optim.Muon's
default), "quintic" is NOT that one but the five triples of modded-nanogpt
(https://leloykun.github.io/ponder/muon-opt-coeffs/).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hip_ops.errors import mistake
from hip_ops.newton_schulz_form import choose_form
from hip_ops.runtime.tile_choice import relative_time

HALF_TYPES = (torch.bfloat16, torch.float16)
HALF_SCALES = (2.0**8, 2.0**10, 2.0**4)  # of X, R and Q

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


@dataclass(frozen=True)
class Plan:
    triples: tuple[Triple, ...]
    form: str  # "standard" or "gram"
    restarts: tuple[int, ...]  # steps before which the Gram form restarts
    dtype: torch.dtype  # of X, R and Q

    @classmethod
    def of(cls, coefficients: Sequence[float], form: str, restarts: Sequence[int], dtype: torch.dtype | None) -> Plan:
        """Return the plan whose triples are `coefficients` in one flat list, as in the operator's schema; dtype None is
        fp16.
        """
        triples = zip(coefficients[0::3], coefficients[1::3], coefficients[2::3], strict=True)
        return cls(tuple(triples), form, tuple(restarts), dtype or torch.float16)

    @property
    def scales(self) -> tuple[float, float, float]:
        return HALF_SCALES if self.dtype == torch.float16 else (1.0, 1.0, 1.0)


def make_plan(triples: tuple[Triple, ...], n: int, m: int, dtype: torch.dtype) -> Plan:
    """Choose the form by multiply-adds. n, m: both sides of the matrix in either order; dtype: of the matrices
    inside.
    """
    return Plan(triples, *choose_form(n, m, len(triples), dtype == torch.bfloat16)[:2], dtype)


def tile_count(symmetric: bool, m: int, n: int, block_m: int, block_n: int) -> int:
    """Return the number of tiles of one matrix, as the kernel counts them."""
    rows, columns = -(-m // block_m), -(-n // block_n)
    if not symmetric:
        return rows * columns
    if block_m == block_n:
        return rows * (rows + 1) // 2
    return rows * (rows + 1) if block_m > block_n else (rows // 2 + rows % 2) * (rows // 2 + 1)


# Sides of the HIP kernels' tiles, with the other issue slots and the LDS time of their inner loops for 256 MFMA passes. On
# gfx950 a pass has twice the products (LDS at CDNA3's rate). Other architectures count as gfx942.
TILE_SIDES = {
    "gfx942": {256: (35, 128), 128: (57, 192), 64: (132, 384)},
    "gfx950": {256: (69, 256), 128: (114, 384), 64: (264, 768)},
}


def tile_side(symmetric: bool, batch: int, m: int, n: int, architecture: str = "gfx942") -> int:
    """Return the side of the tiles with which a HIP product finishes first by `relative_time`."""

    sides = TILE_SIDES.get(architecture, TILE_SIDES["gfx942"])

    def finished(side: int) -> float:
        tiles = batch * tile_count(symmetric, m, n, side, side)
        return relative_time(architecture, tiles, side * side, *sides[side])

    return min(sides, key=finished)
