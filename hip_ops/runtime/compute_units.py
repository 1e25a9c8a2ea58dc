# SPDX-License-Identifier: Apache-2.0
"""Counts the tiles of a matrix product, and estimates which tile finishes first on an MI300X. Nothing of it is
measured.
"""

from __future__ import annotations

import math

COMPUTE_UNITS = 304  # of an MI300X


def relative_time(tiles: float, area: int, other_slots: int, lds: int) -> float:
    """Return the relative time of `tiles` tiles of `area` elements: rounds over all compute units, times the area, times
    what the compiled inner loop takes for 256 MFMA passes, its parts one after the other.

    other_slots: issue slots of a wave that are no MFMA; lds: time of the LDS accesses in passes of 4 cycles, with their
    bank conflicts. Memory, and overlap within a compute unit, are ignored.
    """
    return math.ceil(tiles / COMPUTE_UNITS) * area * (256 + other_slots + lds)


def tile_count(symmetric: bool, m: int, n: int, block_m: int, block_n: int) -> int:
    """Return the number of tiles of one matrix, as the kernel counts them."""
    rows, columns = -(-m // block_m), -(-n // block_n)
    if not symmetric:
        return rows * columns
    if block_m == block_n:
        return rows * (rows + 1) // 2
    return rows * (rows + 1) if block_m > block_n else (rows // 2 + rows % 2) * (rows // 2 + 1)
