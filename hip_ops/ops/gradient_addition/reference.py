# SPDX-License-Identifier: Apache-2.0
"""Adds a gradient that was rounded to 16 bits to an fp32 main gradient, in plain torch."""

from __future__ import annotations

from torch import Tensor


def add_gradient_(total: Tensor, part: Tensor) -> None:
    """Compute total += part in place, in total's dtype."""
    total.add_(part)
