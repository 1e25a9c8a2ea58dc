# SPDX-License-Identifier: Apache-2.0
"""The matrix products of one rank's step, with the sizes with which training calls them, and their rate on a device. No
torch import.

Each linear layer y = x W^T, x [rows, in], has three: forward y [rows, out], dgrad dx = dy W [rows, in], and wgrad
dW = dy^T x [out, in], which is added to an fp32 gradient (hip_ops/runtime/main_grad.py).

A machine's recipe gives the rate of one large product (`machine.gemm_tflops`), measured or what public kernels reach.
That rate is scaled by the ratio of two ideal rates, of the given product and of 8192 x 8192 x 8192. An ideal rate is
that of the best tile: its loop takes the longest of three clocks, of matrix unit, LDS and L1, for each 32 of k, then all
units store their tiles at the copy rate, and the last round may leave units idle. Not modelled: launches, the first
loads, the clock under load, the L2 cache, and stores under another tile's loop; docs/predictions.md shows the error.
"""

from collections import Counter
from dataclasses import dataclass, replace
from math import ceil

from hip_ops.saved_bytes import chunk_for
from zaya_plugin.plan.flops import Shape, muon_matrices
from zaya_plugin.plan.memory import MUON_ROUND_ELEMENTS, tokens_of_rank
from zaya_plugin.plan.parallelism import GRADIENT_BYTES, Batch, ParallelSizes

DIRECTIONS = ("forward", "dgrad", "wgrad")


@dataclass(frozen=True)
class Product:
    """A product [m, k] @ [k, n], `batch` of them in one call.

    Attributes:
        part: of the step, as in zaya_plugin.bench.step_parts. name: of the linear layer. direction: one of DIRECTIONS,
            or "gram", "square" or "apply" of Newton-Schulz.
        calls: of this rank in a step. out_bytes: of an element of the result.
        library: whether training calls hipBLASLt or cuBLAS through torch; false: an operator of hip_ops.
    """

    part: str
    name: str
    direction: str
    m: int
    n: int
    k: int
    batch: int = 1
    calls: int = 1
    out_bytes: int = 2
    library: bool = True

    @property
    def flops(self) -> float:
        """Operations of one call, a multiply-add as two."""
        return 2.0 * self.m * self.n * self.k * self.batch

    def rounded(self, multiple: int) -> "Product":
        """Return the product with m, n and k rounded up to multiples of `multiple`."""
        m, n, k = (ceil(size / multiple) * multiple for size in (self.m, self.n, self.k))
        return replace(self, m=m, n=n, k=k)


def square_product(extent: int) -> Product:
    """Return a plain product of square matrices, as vendors measure it."""
    return Product("", "square", "square", extent, extent, extent)


def _linear(product: Product) -> list[Product]:
    """Return the three products of a linear layer from its forward one: m rows, n outputs, k inputs."""
    rows, outputs, inputs = product.m, product.n, product.k
    wgrad = replace(product, direction="wgrad", m=outputs, n=inputs, k=rows, out_bytes=GRADIENT_BYTES)
    return [product, replace(product, direction="dgrad", n=inputs, k=outputs), wgrad]


def products(shape: Shape, layout: ParallelSizes, batch: Batch) -> list[Product]:
    """Return the products of the model on a rank that holds the head; experts have evenly routed tokens.

    Under tensor parallelism of t, attention and head have t times as many rows, of 1 / t of the channels. The head is
    computed in chunks of tokens. Recomputation is not counted.
    """
    tokens, tensor, experts = tokens_of_rank(layout, batch), layout.tensor, shape.num_experts // layout.expert
    rows, h, r = tokens * tensor, shape.hidden_size, shape.router_hidden_size
    q, k, classes = shape.query_channels // tensor, shape.key_channels // tensor, shape.vocab_size // tensor
    chunk = chunk_for(rows, classes, batch.dtype_bytes)
    calls, f = shape.num_layers // layout.pipeline * batch.micro_batches, shape.moe_ffn_hidden_size
    common = {"direction": "forward", "calls": calls, "out_bytes": batch.dtype_bytes}
    of_experts = {**common, "batch": experts, "library": False}
    forward = [
        Product("projections", "queries, keys, values", m=rows, n=q + 2 * k, k=h, **common),
        Product("projections", "output", m=rows, n=h, k=q, **common),
        Product("router", "router down", m=tokens, n=r, k=h, **common),
        Product("router", "router 1 and 2", m=tokens, n=r, k=r, **{**common, "calls": 2 * calls, "library": False}),
        Product("router", "router classes", m=tokens, n=shape.num_experts + 1, k=r, **{**common, "library": False}),
        Product("experts", "gate and up", m=ceil(tokens / experts), n=2 * f, k=h, **of_experts),
        Product("experts", "down", m=ceil(tokens / experts), n=h, k=f, **of_experts),
        Product(
            "head", "head", m=chunk, n=classes, k=h, **{**common, "calls": ceil(rows / chunk) * batch.micro_batches}
        ),
    ]
    return [product for linear in forward for product in _linear(linear)]


def update_products(
    shape: Shape, layout: ParallelSizes, dtype_bytes: int = 2, split_gate_up: bool = True, steps: int = 5
) -> list[Product]:
    """Return the products of Newton-Schulz in its standard form, on a rank with its share of the experts' matrices; the
    largest that a round of Muon takes at once.

    X [n, m], n <= m: gram X X^T and square (X X^T)^2, of which the operators compute one triangle, and apply P X. The
    Gram form (hip_ops/ops/newton_schulz/plan.py) has the same products in other numbers.
    """
    listed = []
    sizes = Counter(tuple(sorted(size)) for size in muon_matrices(shape, split_gate_up)[0])
    experts = shape.num_layers // layout.pipeline * shape.num_experts // layout.expert
    for (n, m), number in sizes.items():
        matrices = ceil(number * experts / layout.expert_shards)
        batch = max(1, min(matrices, MUON_ROUND_ELEMENTS // (n * m)))
        common = {"part": "optimizer", "name": f"Newton-Schulz {n} x {m}", "batch": batch, "out_bytes": dtype_bytes}
        common |= {"calls": steps * ceil(matrices / batch), "library": False, "m": n}
        sides = {"gram": (n, m), "square": (n, n), "apply": (m, n)}
        listed += [Product(direction=direction, n=columns, k=k, **common) for direction, (columns, k) in sides.items()]
    return listed


SLAB_DEPTH, HALF_BYTES = 32, 2  # of k in one step of a loop; bytes of an operand
LARGE_PRODUCT = (8192, 8192, 8192)


@dataclass(frozen=True)
class Tile:
    """A block's tile of the result, and the part of it that each wave (on NVIDIA each warpgroup) computes."""

    rows: int
    columns: int
    wave_rows: int
    wave_columns: int


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
        waves = tile.rows // tile.wave_rows * (tile.columns // tile.wave_columns)
        read = waves * (tile.wave_rows + tile.wave_columns) * SLAB_DEPTH * HALF_BYTES
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
    rates = {part: processor.relative_rate(item.m, item.n, item.k, item.batch) for part, item in largest.items()}
    return {part: rates[part] for part in ("projections", "experts", "head")}
