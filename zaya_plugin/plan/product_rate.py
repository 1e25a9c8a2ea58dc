# SPDX-License-Identifier: Apache-2.0
"""Rate of a matrix product from its sizes: the loop's matrix, LDS and L1 clocks, and whole tiles on whole processors.

A machine's recipe gives the rate of one large product (`machine.gemm_tflops`), measured or what public kernels reach.
That rate is scaled by the ratio of two ideal rates, of the given product and of 8192 x 8192 x 8192. An ideal rate
is that of the best tile: its loop takes the longest of its three clocks for each 32 of k, then all units store their
tiles at the copy rate, and the last round may leave units idle. Not modelled: launches, the first loads, the clock
under load, the L2 cache, and stores under another tile's loop; docs/predictions.md shows the error. No torch import.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from zaya_plugin.plan.flops import Shape
from zaya_plugin.plan.memory import tokens_of_rank
from zaya_plugin.plan.parallelism import Batch, ParallelSizes
from zaya_plugin.plan.products import products

SLAB_DEPTH, HALF_BYTES = 32, 2  # of k in one step of a loop; bytes of an operand
LARGE_PRODUCT = (8192, 8192, 8192)


@dataclass(frozen=True)
class Tile:
    """A block's tile of the result, and the part of it that each wave (on NVIDIA each warpgroup) computes."""

    rows: int
    columns: int
    wave_rows: int
    wave_columns: int

    @property
    def waves(self) -> int:
        return self.rows // self.wave_rows * (self.columns // self.wave_columns)


@dataclass(frozen=True)
class Processor:
    """Per unit (compute unit, multiprocessor) and clock: bf16 operations, bytes of LDS, of L1 and of a copy."""

    units: int
    flops: int
    lds_bytes: int
    l1_bytes: int
    copy_bytes: float
    tiles: tuple[Tile, ...]

    def clocks(self, tile: Tile) -> dict[str, float]:
        """Return clocks of a unit for one slab of a tile: matrix unit, LDS (written once, read by every wave), L1."""
        loaded = (tile.rows + tile.columns) * SLAB_DEPTH * HALF_BYTES
        read = tile.waves * (tile.wave_rows + tile.wave_columns) * SLAB_DEPTH * HALF_BYTES
        return {
            "matrix": 2 * tile.rows * tile.columns * SLAB_DEPTH / self.flops,
            "lds": (loaded + read) / self.lds_bytes,
            "l1": loaded / self.l1_bytes,
        }

    def share(self, m: int, n: int, k: int, batch: int = 1, out_bytes: int = HALF_BYTES) -> float:
        """Return the share of the matrix units' peak that the best tile reaches, over whole rounds of tiles. out_bytes:
        of an element of the result.
        """
        needed = 2.0 * m * n * k * batch / self.flops / self.units

        def taken(tile: Tile) -> float:
            rounds = ceil(batch * ceil(m / tile.rows) * ceil(n / tile.columns) / self.units)
            stored = tile.rows * tile.columns * out_bytes / self.copy_bytes
            return rounds * (ceil(k / SLAB_DEPTH) * max(self.clocks(tile).values()) + stored)

        return needed / min(map(taken, self.tiles))

    def relative_rate(self, *product: int) -> float:
        """Return the rate of a product, or of `batch` equal ones at once, as a multiple of that of the large one;
        arguments of `share`.
        """
        return self.share(*product) / self.share(*LARGE_PRODUCT)


# A copy at 4.33 TB/s and 2.1 GHz; Hopper's at 4.2 and 3.0 TB/s and 1.83 GHz.
CDNA3 = Processor(
    304,
    2048,
    128,
    64,
    6.8,
    (Tile(64, 64, 32, 32), Tile(128, 128, 64, 64), Tile(256, 128, 64, 64), Tile(256, 256, 128, 64)),
)
# Twice the operations a clock and the LDS bandwidth of CDNA3 (AMD's CDNA 4 white paper); a copy at 5.8 TB/s and 2.4 GHz.
CDNA4 = replace(CDNA3, units=256, flops=4096, lds_bytes=256, copy_bytes=9.4)
H200 = Processor(132, 4096, 128, 64, 17.4, (Tile(64, 128, 64, 128), Tile(128, 128, 64, 128), Tile(128, 256, 64, 256)))
# By part of the device's name in torch.
PROCESSORS = {
    **dict.fromkeys(("MI300X", "MI325X"), CDNA3),
    **dict.fromkeys(("MI350X", "MI355X"), CDNA4),
    "H100": replace(H200, copy_bytes=12.4),
    "H200": H200,
}


def processor_of(device: str | None) -> Processor | None:
    """Return the processor of a device by its name, None for one that is not known."""
    return next((processor for name, processor in PROCESSORS.items() if name in (device or "")), None)


def rates_of_parts(device: str | None, shape: Shape, layout: ParallelSizes, batch: Batch) -> dict[str, float]:
    """Return the relative rate of the largest product of projections, experts (with evenly routed tokens) and head in a
    micro-batch, by part; nothing for a device that is not known.
    """
    processor = processor_of(device)
    if processor is None:
        return {}
    forward = [product for product in products(shape, layout, batch) if product.direction == "forward"]
    largest = {product.part: product for product in sorted(forward, key=lambda product: product.flops)}
    # Chunks of the head have nearly the rate of all rows in one product (2,048 of 16,384 rows: 0.1 % less).
    largest["head"] = replace(largest["head"], m=tokens_of_rank(layout, batch) * layout.tensor)
    parts = ("projections", "experts", "head")
    return {part: processor.relative_rate(p.m, p.n, p.k, p.batch) for part in parts for p in [largest[part]]}
