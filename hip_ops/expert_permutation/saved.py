# SPDX-License-Identifier: Apache-2.0
"""What `permute_to_experts` and `unpermute_from_experts` keep for their backward passes. Needs no torch."""


def saved_bytes(tokens: int) -> dict[str, float]:
    """Bytes by tensor: both maps, int32, which the two operators share.

    unpermute_from_experts with probs also keeps its rows and probs. The model applies the probs in weighted_swiglu, which
    keeps them. The permuted rows are kept by the first grouped product (hip_ops/grouped_product/saved.py).
    """
    return {"order of the tokens": 2 * 4 * tokens}
