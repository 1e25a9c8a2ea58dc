# SPDX-License-Identifier: Apache-2.0
"""Bytes that the experts keep of their matrix products for the backward pass."""


def saved_bytes(tokens: int, hidden: int, dtype_bytes: int) -> dict[str, float]:
    """Returns bytes by tensor of zaya_plugin.model.experts.ExpertMLP: the first product's operand, unless "permute" is
    recomputed.

    The first product's result is weighted_swiglu's input and is counted there. The second product's operand is computed
    again.
    """
    return {"rows sorted by expert": dtype_bytes * hidden * tokens}
