# SPDX-License-Identifier: Apache-2.0
"""Bytes that `scaled_residual_rms_norm` keeps for its backward pass. Needs no torch: memory plans are made on login
nodes.
"""


def saved_bytes(rows: int, hidden: int, output_bytes: int, residual_bytes: int) -> dict[str, float]:
    """Returns bytes by tensor: of the inputs output and residual (the stream), which no other operator keeps, and of
    rstd.
    """
    return {"output": output_bytes * hidden * rows, "residual": residual_bytes * hidden * rows, "rstd": 4 * rows}
