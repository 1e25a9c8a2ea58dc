# SPDX-License-Identifier: Apache-2.0
"""The cost of orthogonalising a matrix, for sharing matrices out evenly. Symmetric products count half of dense
ones.
"""

from __future__ import annotations

# FLOPs of Newton-Schulz in the time of reading and writing an element's gradient, momentum and weight. For all of
# ZAYA1-base these passes take 60 of 596 ms on one H200 (benchmarks/results/optimizer_step-h200.json), where
# Newton-Schulz ran at 470 TFLOP/s.
FLOPS_PER_ELEMENT = 3_000


def newton_schulz_flops(m: int, n: int, steps: int = 5) -> float:
    """Return the FLOPs of `steps` quintic Newton-Schulz iterations on one m x n matrix, in the cheaper of two forms.

    With s = min(m, n) and a = max(m, n) / s: the standard form computes X X^T and (X X^T)^2, both symmetric, and one
    dense product a step, steps * (3 a + 1) * s^3. The Gram form with one restart iterates on the small side,
    (4 steps + 6 a - 6) * s^3 (Gram-Newton-Schulz, Dao-AILab, 2026-03-30). Equal for square matrices.
    """
    small, ratio = min(m, n), max(m, n) / min(m, n)
    return min(steps * (3 * ratio + 1), 4 * steps + 6 * ratio - 6) * small**3


def muon_work(m: int, n: int) -> int:
    """Return the cost of an m x n matrix in a step, in FLOPs: Newton-Schulz and the passes over its elements."""
    return round(newton_schulz_flops(m, n)) + FLOPS_PER_ELEMENT * m * n
