# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz orthogonalisation of batches of matrices.

    update = newton_schulz(momentum)  # [.., m, n], any orientation

The products of an iteration are symmetric where their factors commute: the kernels compute only their lower triangles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from hip_ops.ops.newton_schulz import quack, reference
from hip_ops.ops.newton_schulz.plan import HALF_TYPES, Triple, coefficient_triples, make_plan
from hip_ops.runtime.launch import architecture, multiprocessors
from hip_ops.runtime.operator import Operator
from hip_ops.runtime.quack_tiles import available

# Small batches (batch, rows, columns) -> side of the tiles that `plan.tile_side` chooses for all their products. Some
# products of the second batch are too short for the pipelined loop.
LARGE_TILES = {
    "gfx942": {(64, 200, 328): 128, (240, 72, 200): 128, (92, 392, 520): 256},
    "gfx950": {(64, 200, 328): 128, (240, 72, 200): 128, (82, 392, 520): 256},
}
DTYPES = (None, *HALF_TYPES, torch.float32, torch.float64)  # dtypes of the matrices in the iteration


def _rule(values: dict) -> tuple[str, str] | None:
    return None if values["dtype"] in DTYPES else (f"dtype is {values['dtype']}", ", ".join(map(str, DTYPES)))


def _fits(x, square_sums, coefficients, form, restarts, dtype, eps) -> bool:
    """Return whether a kernel takes the call: kernels multiply 16-bit matrices."""
    return dtype in (None, *HALF_TYPES) and x.numel() > 0 and len(coefficients) > 0


def _fits_quack(x, square_sums, coefficients, form, restarts, dtype, eps) -> bool:
    return _fits(x, square_sums, coefficients, form, restarts, dtype, eps) and quack.fits(x)


def _prefers_quack(x, *others) -> bool:
    return _fits_quack(x, *others) and quack.faster(x)


def _flat(triples: Iterable[Triple]) -> tuple[float, ...]:
    return tuple(value for triple in triples for value in triple)


def _example(
    batch: int, rows: int, columns: int, form: str = "gram", steps: int = 5, with_sums: bool = False
) -> Callable[[torch.device], tuple]:
    def make(device: torch.device) -> tuple:
        x = torch.randn((batch, rows, columns), device=device).bfloat16()
        restarts = (3,) if form == "gram" else ()
        square_sums = x.float().square().sum((1, 2)) if with_sums else None
        return x, square_sums, _flat(coefficient_triples("simple", steps)), form, restarts, torch.float16, 1e-7

    return make


def _example_of_large_tiles(place: int, form: str) -> Callable[[torch.device], tuple]:
    """Make a batch of LARGE_TILES; on a CPU, where it would take minutes, one small matrix."""

    def make(device: torch.device) -> tuple:
        shapes = LARGE_TILES.get(architecture(device), LARGE_TILES["gfx942"])
        return _example(*((1, 24, 40) if multiprocessors(device) == 1 else [*shapes][place]), form)(device)

    return make


_newton_schulz = Operator(
    reference.newton_schulz,
    takes="""
        x             [batch, rows, columns]  bf16|fp16|fp32
        square_sums?  [batch]                 fp32
    """,
    rule=_rule,
    # more than five slabs of 32: the pipelined loop of the HIP version runs; training passes sums of squares
    example=(_example(2, 200, 168), _example(2, 200, 168, with_sums=True)),
    more_examples={
        # Tiles of 64 with products that are too short for the pipelined loop and others, and rows that are not aligned.
        "hip": (
            *(_example_of_large_tiles(place, form) for place in range(3) for form in ("gram", "standard")),
            *(_example(1, *shape, "standard", steps=2) for shape in ((72, 200), (168, 200), (17, 72))),
        ),
        "quack": (_example(22, 264, 272), _example(9, 528, 520)),  # its other tiles: for many and for large matrices
    },
    tolerance=2.0**-5,  # five steps amplify a rounding of half precision by up to 3.4445^5 = 485 before they damp it
    fits={"hip": _fits, "quack": _fits_quack, "triton": _fits},
    prefers={"quack": _prefers_quack},
    available={"quack": available},
)


@torch.no_grad()
def newton_schulz(
    x: Tensor,
    steps: int = 5,
    coefficients: str | Sequence[Sequence[float]] = "simple",
    *,
    dtype: torch.dtype | None = None,
    eps: float = 1e-7,
    square_sums: Tensor | None = None,
) -> Tensor:
    """Return U S' V^T for x = U S V^T, with S' near 1: steps of X <- a X + (b A + c A^2) X, A = X X^T, from x /
    max(|x|_F, eps).

    x [.., m, n] of any strides, bf16, fp16, fp32 or fp64; matrices are independent; the result is contiguous and has
        x's dtype. All matrices of a call share launches, so pass matrices of one shape together. Matrices that are not
        square take the Gram form, which iterates on x x^T, where that needs fewer multiply-adds (plan.py).
    coefficients: "simple" (Keller Jordan's triple), "quintic" (five triples), "polar_express" (arXiv 2505.16932), as
        Megatron and emerging_optimizers name them, or triples (a, b, c) of your own, one a step, in a cycle.
    dtype: of the matrices inside: float16 (default on GPUs; 8 times as exact as bfloat16 and as fast, kept in range by
        powers of two), bfloat16 (as torch.optim.Muon), float32 (default where the reference runs on a CPU) or float64
        (default for fp64).
    square_sums: None or fp32 [number of matrices], their sums of squares, as `muon_momentum_` writes them: x is read
        once less.

    Not differentiable. fp64 runs the reference. Raises ValueError for other arguments. Zero matrices stay zero; NaN and
    infinity spread in their own matrix only.
    """
    if x.ndim < 2:
        _newton_schulz.declaration.fail("x", f"has shape {tuple(x.shape)}", "one matrix [m, n] or several [.., m, n]")
    triples = coefficient_triples(coefficients, steps)
    plan = make_plan(triples, *x.shape[-2:], dtype or torch.float16)
    if square_sums is not None and x.dtype == torch.float64:
        square_sums = square_sums.double()
    batch = x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    return _newton_schulz(batch, square_sums, _flat(triples), plan.form, plan.restarts, dtype, eps).reshape(x.shape)
