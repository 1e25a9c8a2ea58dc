# SPDX-License-Identifier: Apache-2.0
"""Whether a router can choose the skip class, of which the layouts' loaders compute different outputs."""

from __future__ import annotations

from torch import Tensor


def skip_is_reachable(biases: Tensor) -> bool:
    """Return whether some token may choose the skip class, the last entry of `biases`, of at least two.

    The router takes the largest p + bias. With p of the skip class at most 1 and all others at least 0, the class never
    wins if 1 + its bias is at most the largest of the others.
    """
    biases = biases.float()
    return not bool(1 + biases[-1] <= biases[:-1].max())
