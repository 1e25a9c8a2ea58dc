# SPDX-License-Identifier: Apache-2.0
"""The choice of a product's tile: rows of a JSON table of measured configurations, and an estimate of the tile that
finishes first on an AMD GPU, where nothing was measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

# By architecture; others count as an MI300X (gfx942).
COMPUTE_UNITS = {"gfx942": 304, "gfx950": 256}


def parse(rows: list[dict], config: type, kinds: tuple[str, ...], table: str) -> list[dict]:
    """Return the rows with "config", which holds only the fields that differ from the defaults, as an instance of the
    dataclass `config`. table: the file's name in messages.
    """
    known = {field.name for field in fields(config)}
    for row in rows:
        assert row["kind"] in kinds and set(row["config"]) <= known, f"{table}: {row}"
    return [{**row, "config": config(**row["config"])} for row in rows]


def nearest(rows: Iterable[dict], kind: str, /, **sizes: tuple[float, float]) -> Any:
    """Return the configuration of the row of this kind that is nearest in log scale. sizes: by column, the size and its
    weight.
    """

    def log(number: float) -> float:
        return math.log2(max(number, 1))

    def distance(row: dict) -> float:
        return sum(weight * abs(log(size) - log(row[name])) for name, (size, weight) in sizes.items())

    return min((row for row in rows if row["kind"] == kind), key=distance)["config"]


def relative_time(architecture: str, tiles: float, area: int, other_slots: int, lds: int) -> float:
    """Return the relative time of `tiles` tiles of `area` elements, to compare the tiles that one product may have:
    rounds over all compute units, times the area, times the compiled inner loop's time for 256 MFMA passes, its parts
    one after the other.

    other_slots: issue slots of a wave that are no MFMA; lds: time of the LDS accesses in passes of 4 cycles, with their
    bank conflicts. Memory, and overlap within a compute unit, are ignored.
    """
    return math.ceil(tiles / COMPUTE_UNITS.get(architecture, 304)) * area * (256 + other_slots + lds)
