# SPDX-License-Identifier: Apache-2.0
"""Bytes that `permute_to_experts` and `unpermute_from_experts` keep for their backward passes. Needs no torch."""


def saved_bytes(tokens: int) -> dict[str, float]:
    """Returns bytes by tensor: both int32 maps, which the two operators share.

    weighted_swiglu keeps the probs. The first grouped product keeps the permuted rows
    (hip_ops/ops/grouped_product/saved.py).
    """
    return {"order of the tokens": 2 * 4 * tokens}
