# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz by quack's GEMMs on Hopper (package quack-kernels 0.6.5): CuTe's warp-specialised pipelines.

`gemm_symmetric` computes the tiles on and below the diagonal and stores each of the others a second time, transposed. X
stays in the caller's orientation, as in triton.py: quack reads operands by rows or by columns.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import torch
from torch import Tensor

from hip_ops.ops.newton_schulz.plan import Plan
from hip_ops.ops.newton_schulz.reference import ProductsInOrientation, iterate
from hip_ops.runtime.launch import on
from hip_ops.runtime.quack_tiles import Tile

# Faster than Triton on an H200 (benchmarks/results/newton_schulz-h200-quack.json) from MIN_SIDE on, except single
# matrices of about 1024 rows, whose tiles do not fill the device. Smaller matrices were not measured.
MIN_SIDE, MAX_SIDE_OF_FEW = 256, 512
# quack requires square tiles of a whole cluster and does not check it: other tiles give wrong numbers without an error.
SQUARE_LARGE, SQUARE_SMALL = Tile(128, 128, True, 1, 1), Tile(64, 64, True, 1, 1)
GENERAL_LARGE, GENERAL_BATCH, GENERAL_SMALL = (
    Tile(192, 128, True, 1, 2),
    Tile(128, 256, False, 2, 1),
    Tile(64, 128, True, 1, 1),
)
PROCESSORS = 132  # multiprocessors of an H100 or H200; with fewer tiles of 128 x 128, smaller tiles use more of them


def fits(x: Tensor) -> bool:
    """Return whether rows and columns are multiples of 16 bytes, as quack requires."""
    return x.shape[1] % 8 == 0 and x.shape[2] % 8 == 0


def faster(x: Tensor) -> bool:
    """Return whether quack was measured to be faster than Triton at this size."""
    n = min(x.shape[1:])
    return n >= MIN_SIDE and (n <= MAX_SIDE_OF_FEW or _fills_device(len(x), n))


def _fills_device(batch: int, n: int) -> bool:
    side = -(-n // 128)
    return batch * side * (side + 1) // 2 >= PROCESSORS


def tiles(batch: int, n: int) -> tuple[Tile, Tile]:
    """Return the tiles of the symmetric and of the general product, for matrices whose smaller side is n."""
    if not _fills_device(batch, n):
        return SQUARE_SMALL, GENERAL_SMALL
    return SQUARE_LARGE, GENERAL_LARGE if n >= 512 else GENERAL_BATCH


class QuackProducts(ProductsInOrientation):
    def __init__(self, x: Tensor):
        super().__init__(x.shape[-2] > x.shape[-1], x.dtype)
        self.square, self.general = tiles(len(x), min(x.shape[-2:]))

    def _symmetric(self, a: Tensor, b: Tensor, d: Tensor | None, alpha: float, beta: float, kind: str) -> Tensor:
        c = a.new_empty((a.shape[0], a.shape[1], a.shape[1]))
        gemm_symmetric = importlib.import_module("quack.gemm_symmetric").gemm_symmetric
        gemm_symmetric(a, b, c, d, None, alpha=alpha, beta=1.0 if d is None else beta, **self.square.words())
        return c

    def _apply(self, z: Tensor, x: Tensor, alpha: float, beta: float, dtype: torch.dtype) -> Tensor:
        left, right = (x, z) if self.tall else (z, x.mT)  # left right^T; Z is its own transpose
        c, d = x.new_empty(x.shape, dtype=dtype), x if beta else None
        gemm = importlib.import_module("quack.gemm").gemm
        gemm(left, right, c, d, None, alpha=alpha, beta=beta if beta else 1.0, **self.general.words())
        return c


def newton_schulz(
    x: Tensor,
    square_sums: Tensor | None,
    coefficients: Sequence[float],
    form: str,
    restarts: Sequence[int],
    dtype: torch.dtype | None,
    eps: float,
) -> Tensor:
    """As reference.newton_schulz; dtype None is fp16."""
    from hip_ops.ops.newton_schulz.triton import start_of  # imports Triton, which a machine without a GPU may lack

    plan = Plan.of(coefficients, form, restarts, dtype)
    with on(x.device):
        start = start_of(x, square_sums, eps, plan.scales[0], x.new_empty(x.shape, dtype=plan.dtype))
        return iterate(QuackProducts(x), start, plan)
