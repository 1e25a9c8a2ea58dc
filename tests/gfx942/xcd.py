# SPDX-License-Identifier: Apache-2.0
"""How much operand data each XCD reads for an order of tiles. An MI300X hands block b to XCD b % 8, and each XCD has an
L2 of its own, so operands that blocks of different XCDs share are read once by each of them.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

XCDS = 8
Tile = TypeVar("Tile")


def operand_bytes(
    order: Sequence[Tile], operands: Callable[[Tile], Iterable[tuple[Hashable, int]]], xcds: int = XCDS
) -> list[int]:
    """Distinct operand bytes of each XCD.

    order: the tile of every block, in order of block id; None is a block without work.
    operands: tile -> (key, bytes) of each piece that it reads; equal keys are the same bytes.
    """
    if xcds < 1:
        raise ValueError(f"xcds={xcds}: at least 1")
    pieces: list[dict[Hashable, int]] = [{} for _ in range(xcds)]
    for block, tile in enumerate(order):
        if tile is not None:
            pieces[block % xcds].update(operands(tile))
    return [sum(found.values()) for found in pieces]


def square_operands(tile_bytes: int) -> Callable[[tuple[int, int]], list[tuple[Hashable, int]]]:
    """Operands of the tile (i, j) of A A^T: row panels i and j of `tile_bytes` each, the same panel once on the
    diagonal.
    """
    return lambda tile: [(index, tile_bytes) for index in dict.fromkeys(tile)]


def saving(before: Sequence[int], after: Sequence[int]) -> float:
    """Share of operand bytes that a mapping saves over all XCDs."""
    return 1 - sum(after) / sum(before)
