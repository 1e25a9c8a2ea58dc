# SPDX-License-Identifier: Apache-2.0
"""Bytes that `scaled_residual_rms_norm` and `scaled_residual_layer_norm` keep for their backward pass. Needs no torch: memory plans are made on login
nodes.
"""


def saved_bytes(
    rows: int, hidden: int, output_bytes: int, residual_bytes: int, centered: bool = False
) -> dict[str, float]:
    """Returns bytes by tensor: of the inputs output and residual (the stream), which no other operator keeps, and of
    the statistics: rstd, and LayerNorm's mean. centered: of LayerNorm.
    """
    statistics = 4 * rows * (1 + centered)
    return {
        "output": output_bytes * hidden * rows,
        "residual": residual_bytes * hidden * rows,
        "statistics": statistics,
    }
