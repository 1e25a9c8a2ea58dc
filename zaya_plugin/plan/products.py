# SPDX-License-Identifier: Apache-2.0
"""The matrix products of one rank's step, with the sizes with which training calls them. No torch import.

Each linear layer y = x W^T, x [rows, in], has three: forward y [rows, out], dgrad dx = dy W [rows, in], and wgrad
dW = dy^T x [out, in], which is added to an fp32 gradient (hip_ops/runtime/main_grad.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
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

    def rounded(self, multiple: int) -> Product:
        """Return the product with m, n and k rounded up to multiples of `multiple`."""
        m, n, k = (ceil(size / multiple) * multiple for size in (self.m, self.n, self.k))
        return replace(self, m=m, n=n, k=k)


def square_product(extent: int) -> Product:
    """Return a plain product of square matrices, as vendors measure it."""
    return Product("", "square", "square", extent, extent, extent)


def _linear(product: Product) -> Iterator[Product]:
    """Yield the three products of a linear layer from its forward one: m rows, n outputs, k inputs."""
    rows, outputs, inputs = product.m, product.n, product.k
    yield product
    yield replace(product, direction="dgrad", n=inputs, k=outputs)
    yield replace(product, direction="wgrad", m=outputs, n=inputs, k=rows, out_bytes=GRADIENT_BYTES)


def products(shape: Shape, layout: ParallelSizes, batch: Batch) -> list[Product]:
    """Return the products of the model on a rank that holds the head; experts have evenly routed tokens.

    Under tensor parallelism of t, attention and head have t times as many rows, of 1 / t of the channels. The head is
    computed in chunks of tokens. Recomputation is not counted.
    """
    tokens, tensor = tokens_of_rank(layout, batch), layout.tensor
    rows, experts, h, r = (
        tokens * tensor,
        shape.num_experts // layout.expert,
        shape.hidden_size,
        shape.router_hidden_size,
    )
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
        listed.append(Product(direction="gram", n=n, k=m, **common))
        listed.append(Product(direction="square", n=n, k=n, **common))
        listed.append(Product(direction="apply", n=m, k=n, **common))
    return listed
