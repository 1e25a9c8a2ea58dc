# SPDX-License-Identifier: Apache-2.0
"""Bytes that `cca_prologue` keeps for its backward pass. Plain arithmetic, without torch."""

FLOAT32 = 4


def saved_bytes(tokens: float, heads: int, groups: int, head_dim: int, element_bytes: int) -> dict[str, float]:
    """Returns bytes by tensor, as hip_ops.cca_prologue saves them: `heads` query heads and `groups` key heads of
    `head_dim` channels.

    query and key are also kept by attention; count them once. Left out: the parameters, the rope table and starts,
    which all layers share, and the halos of a few rows.
    """
    row = float(element_bytes * head_dim * tokens)
    return {
        "projected": (heads + 2 * groups) * row,
        "query": heads * row,
        "key": groups * row,
        "inverse_norm": float(FLOAT32 * (heads + groups) * tokens),
    }
