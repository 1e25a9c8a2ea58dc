# SPDX-License-Identifier: Apache-2.0
"""The form of a Newton-Schulz iteration and its FLOPs, by hip_ops/ops/newton_schulz/plan.py's formulas. Needs no torch,
so that plans can be made on a login node.
"""

LAST_STRETCH, STRETCH = 2, 3  # steps between restarts
MIN_GRAM_SIDE = 384  # below, launches take longer than the products themselves
# required share of the standard form's multiply-adds; reached from m/n = 1.27 for 5 steps and 1 restart
GRAM_GAIN = 0.9


def default_restarts(steps: int) -> tuple[int, ...]:
    """Return the steps before which the Gram form restarts: (3,) of 5 steps, (3, 6) of 8."""
    return tuple(sorted(range(steps - LAST_STRETCH, 0, -STRETCH)))


def multiply_adds(form: str, n: int, m: int, steps: int, restarts: int = 0) -> float:
    """Return the multiply-adds of one matrix; symmetric products count half; n <= m."""
    if not (steps and n):
        return 0.0
    aspect = m / n
    if form == "standard":
        return steps * (1.5 * aspect + 0.5) * n**3
    return (2 * steps + 1.5 * aspect - 1.5 + 1.5 * (aspect - 1) * restarts) * n**3


def choose_form(n: int, m: int, steps: int, bf16: bool) -> tuple[str, tuple[int, ...], float]:
    """Return the form, the restarts and the multiply-adds. n, m: both sides of the matrix in either order; bf16: of the
    matrices inside.
    """
    n, m = min(n, m), max(n, m)
    restarts = default_restarts(steps)
    gram, standard = multiply_adds("gram", n, m, steps, len(restarts)), multiply_adds("standard", n, m, steps)
    # bfloat16 loses in R what the standard form reads from X: 1.4 times its error on Gaussian matrices.
    if n >= MIN_GRAM_SIDE and not bf16 and gram <= GRAM_GAIN * standard:
        return "gram", restarts, gram
    return "standard", (), standard


def newton_schulz_flops(n: int, m: int, steps: int = 5, bf16: bool = False) -> float:
    """Return the FLOPs of one matrix in the form that `choose_form` chooses."""
    return 2 * choose_form(n, m, steps, bf16)[2]
