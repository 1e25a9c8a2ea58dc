# SPDX-License-Identifier: Apache-2.0
"""Tile, grid and options of a Triton kernel's launch, chosen once for each set of sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch


def default_warp_size() -> int:
    """Return the lanes of a warp of the devices that this torch is built for."""
    return 32 if torch.version.hip is None else 64


@dataclass(frozen=True)
class Launch:
    """Tile, grid and options of a kernel.

    rows, columns: of a tile. programs: the largest number of them over the rows; None: one a tile. stages: tiles in
    flight. registers: maximum per thread, None: no limit (NVIDIA only).
    """

    rows: int
    columns: int
    num_warps: int
    programs: int | None = None
    stages: int = 1
    registers: int | None = None

    @property
    def options(self) -> dict:
        return {"num_warps": self.num_warps} | ({"maxnreg": self.registers} if self.registers else {})

    def grid(self, rows: int, columns: int | None = None, processors: int = 1) -> tuple[int, ...]:
        """Return the number of programs over the rows, each with equally many tiles, and over the columns.

        processors: multiplies `programs`, where they are counted by multiprocessor.
        """
        tiles = -(-rows // self.rows)
        if self.programs is not None:
            tiles = -(-tiles // -(-tiles // (self.programs * processors)))
        return (tiles,) if columns is None else (tiles, -(-columns // self.columns))


@functools.lru_cache(maxsize=1024)
def plan(
    choose: Callable[..., Launch], names: tuple[str, ...], extent: tuple[int, ...], *sizes, processors=1, **options
) -> tuple[tuple[int, ...], dict]:
    """Return the grid over `extent`, (rows,) or (rows, columns), and the kernel's keywords.

    choose: the module's `launch`, which gets sizes and options; it is part of the key because benchmarks and tests
    replace it. names: those of the kernel for rows, columns and stages of a tile.
    """
    chosen = choose(*sizes, **options)
    tile = zip(names, (chosen.rows, chosen.columns, chosen.stages), strict=False)
    return chosen.grid(*extent, processors=processors), dict(tile) | chosen.options
