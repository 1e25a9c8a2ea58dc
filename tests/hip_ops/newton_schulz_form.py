# SPDX-License-Identifier: Apache-2.0
"""Runs hip_ops.newton_schulz in a given form. The operator takes the Gram form only for matrices too large for a test
on a CPU.
"""

import contextlib
from collections.abc import Sequence
from unittest import mock

from hip_ops.newton_schulz_form import default_restarts
from hip_ops.ops import newton_schulz
from hip_ops.ops.newton_schulz.plan import Plan


def plan_of(form: str, triples, dtype, restarts: Sequence[int] | None = None) -> Plan:
    """restarts: of the Gram form; None: the operator's."""
    if form == "standard":
        return Plan(triples, form, (), dtype)
    return Plan(triples, form, tuple(default_restarts(len(triples)) if restarts is None else restarts), dtype)


def arguments(plan: Plan, eps: float = 1e-7) -> tuple:
    """Return the arguments of a version behind x and square_sums."""
    return newton_schulz._flat(plan.triples), plan.form, plan.restarts, plan.dtype, eps


def in_form(form: str, restarts: Sequence[int] | None = None):
    """A context. form: "standard", "gram", or "auto" for the operator's choice."""
    if form == "auto":
        return contextlib.nullcontext()
    return mock.patch.object(
        newton_schulz, "make_plan", lambda triples, n, m, dtype: plan_of(form, triples, dtype, restarts)
    )
