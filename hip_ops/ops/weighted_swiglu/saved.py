# SPDX-License-Identifier: Apache-2.0
"""Bytes that `weighted_swiglu` keeps for its backward pass: its arguments. Needs no torch."""


def saved_bytes(rows: int, width: int, experts: int, dtype_bytes: int) -> dict[str, float]:
    """Returns bytes by tensor: gate_up, fp32 probs and int32 offsets. experts: of this rank.

    gate_up is the first grouped product's result, which that product does not keep. The output is computed again.
    """
    return {"gate and up": dtype_bytes * 2 * width * rows, "weights": 4 * rows, "offsets": 4 * experts}
