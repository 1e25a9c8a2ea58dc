# SPDX-License-Identifier: Apache-2.0
"""Newton-Schulz orthogonalisation of batches of matrices, and the symmetric product that it is built on.

update = newton_schulz(momentum)                        # [.., m, n], any orientation
updates = orthogonalize_many(list_of_matrices)           # grouped by shape, one batch a shape
c = symmetric_product(a, b, alpha=2.0, beta=-1.0)        # 2 a a^T - b, half the multiply-adds of a general product
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hip_ops import backend, captured
from hip_ops.newton_schulz_coefficients import coefficient_triples
from hip_ops.newton_schulz_plan import Plan, make_plan
from hip_ops.operator import Operator
from hip_ops.reference import newton_schulz as reference

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _matrices(*shape: int, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, device=device).to(dtype)


def _symmetric_example(device: torch.device) -> tuple:
    d = torch.randn((2, 200, 200), device=device)
    return _matrices(2, 200, 104, device=device), (d + d.mT).bfloat16(), 0.5, 2.0


def _newton_schulz_example(device: torch.device) -> tuple:
    plan = Plan(coefficient_triples("simple", 5), "gram", (3,), torch.float16)
    return _matrices(2, 200, 136, device=device), None, plan, 1e-7


_symmetric = Operator(
    "symmetric_product",
    torch=reference.symmetric_product,
    triton="hip_ops.triton_kernels.newton_schulz:symmetric_product",
    hip="hip_ops.hip_kernels.newton_schulz:symmetric_product",
    example=_symmetric_example,
)
_matmul_add = Operator(
    "matmul_add",
    torch=reference.matmul_add,
    triton="hip_ops.triton_kernels.newton_schulz:matmul_add",
    hip="hip_ops.hip_kernels.newton_schulz:matmul_add",
    example=lambda device: (
        _matrices(2, 136, 200, device=device),
        _matrices(2, 200, 104, device=device),
        _matrices(2, 136, 104, device=device),
        0.5,
        2.0,
    ),
)
_newton_schulz = Operator(
    "newton_schulz",
    torch=reference.newton_schulz,
    triton="hip_ops.triton_kernels.newton_schulz:newton_schulz",
    hip="hip_ops.hip_kernels.newton_schulz:newton_schulz",
    example=_newton_schulz_example,
    tolerance=2.0**-5,  # five steps amplify a rounding of half precision by up to 3.4445^5 = 485 before they damp it
)


def _check(operator: str, name: str, x: Tensor, dtypes: tuple[torch.dtype, ...] = INPUT_DTYPES) -> None:
    if x.ndim < 2:
        raise ValueError(
            f"hip_ops.{operator}: {name} has shape {tuple(x.shape)}; it must be a matrix [m, n] or a batch of them [.., m, n]"
        )
    if x.dtype not in dtypes:
        raise ValueError(f"hip_ops.{operator}: {name} is {x.dtype}; it must be one of {', '.join(map(str, dtypes))}")


def _batch(x: Tensor) -> Tensor:
    """[.., m, n] as [batch, m, n], also where an extent is 0."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


@torch.library.custom_op("hip_ops::symmetric_product", mutates_args=())
def _symmetric_op(a: Tensor, b: Tensor | None, alpha: float, beta: float) -> Tensor:
    if a.numel() == 0:
        return a.new_zeros((a.shape[0], a.shape[1], a.shape[1])) if b is None else b * beta
    return _symmetric(a, b, alpha, beta).contiguous()


@_symmetric_op.register_fake
def _(a: Tensor, b: Tensor | None, alpha: float, beta: float) -> Tensor:
    return a.new_empty((a.shape[0], a.shape[1], a.shape[1]))


def _symmetric_setup(ctx, inputs, output) -> None:
    a, b, ctx.alpha, ctx.beta = inputs
    ctx.has_b = b is not None
    ctx.save_for_backward(a)


def _symmetric_backward(ctx, gradient: Tensor):
    """C = alpha A A^T + beta B: dA = alpha (G + G^T) A, dB = beta G."""
    (a,) = ctx.saved_tensors
    grad_a = _matmul_op(gradient + gradient.mT, a, None, ctx.alpha, 0.0) if ctx.needs_input_grad[0] else None
    return grad_a, gradient * ctx.beta if ctx.has_b and ctx.needs_input_grad[1] else None, None, None


_symmetric_op.register_autograd(_symmetric_backward, setup_context=_symmetric_setup)


@torch.library.custom_op("hip_ops::matmul_add", mutates_args=())
def _matmul_op(a: Tensor, b: Tensor, d: Tensor | None, alpha: float, beta: float) -> Tensor:
    if 0 in (*a.shape, *b.shape):
        product = a.new_zeros((a.shape[0], a.shape[1], b.shape[2]))
        return product if d is None else product.add_(d, alpha=beta)
    return _matmul_add(a, b, d, alpha, beta).contiguous()


@_matmul_op.register_fake
def _(a: Tensor, b: Tensor, d: Tensor | None, alpha: float, beta: float) -> Tensor:
    return a.new_empty((a.shape[0], a.shape[1], b.shape[2]))


def _matmul_setup(ctx, inputs, output) -> None:
    a, b, d, ctx.alpha, ctx.beta = inputs
    ctx.has_d = d is not None
    ctx.save_for_backward(a, b)


def _matmul_backward(ctx, gradient: Tensor):
    a, b = ctx.saved_tensors
    grad_a = _matmul_op(gradient, b.mT, None, ctx.alpha, 0.0) if ctx.needs_input_grad[0] else None
    grad_b = _matmul_op(a.mT, gradient, None, ctx.alpha, 0.0) if ctx.needs_input_grad[1] else None
    return grad_a, grad_b, gradient * ctx.beta if ctx.has_d and ctx.needs_input_grad[2] else None, None, None


_matmul_op.register_autograd(_matmul_backward, setup_context=_matmul_setup)


@torch.library.custom_op("hip_ops::newton_schulz", mutates_args=())
def _newton_schulz_op(
    x: Tensor,
    square_sums: Tensor | None,
    coefficients: Sequence[float],
    form: str,
    restarts: Sequence[int],
    dtype: torch.dtype,
    eps: float,
) -> Tensor:
    flat = list(coefficients)
    plan = Plan(tuple(zip(flat[0::3], flat[1::3], flat[2::3], strict=True)), form, tuple(restarts), dtype)
    return captured.run(_newton_schulz, x, square_sums, plan, eps)


@_newton_schulz_op.register_fake
def _(x, square_sums, coefficients, form, restarts, dtype, eps) -> Tensor:
    return x.new_empty(x.shape)


def symmetric_product(a: Tensor, b: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """alpha a a^T + beta b, [.., n, n] and equal to its transpose bit by bit.

    a [.., n, k] of any strides: bf16 or fp16 (kernels, fp32 accumulation, one rounding), or fp32 or fp64 (plain torch).
    b: None or [.., n, n] of the same dtype, symmetric; only its lower triangle is certain to be read. Differentiable in a and b.
    """
    _check("symmetric_product", "a", a)
    shape = (*a.shape[:-1], a.shape[-2])
    if b is not None and (b.shape != shape or b.dtype != a.dtype or b.device != a.device):
        raise ValueError(
            f"hip_ops.symmetric_product: b is {b.dtype} {tuple(b.shape)} on {b.device}; it must be {a.dtype} {tuple(shape)} on {a.device}, as a asks"
        )
    return _symmetric_op(_batch(a), None if b is None else _batch(b), alpha, beta).reshape(shape)


def matmul_add(a: Tensor, b: Tensor, d: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    """alpha a b + beta d for a [.., m, k], b [.., k, n] and d None or [.., m, n], dtypes as in `symmetric_product`. Differentiable."""
    _check("matmul_add", "a", a)
    shape = (*a.shape[:-1], b.shape[-1])
    for name, x, wanted in (("b", b, (*a.shape[:-2], a.shape[-1], b.shape[-1])), ("d", d, shape)):
        if x is not None and (x.shape != wanted or x.dtype != a.dtype or x.device != a.device):
            raise ValueError(
                f"hip_ops.matmul_add: {name} is {x.dtype} {tuple(x.shape)} on {x.device}; it must be {a.dtype} {tuple(wanted)} on {a.device}, as a asks"
            )
    return _matmul_op(_batch(a), _batch(b), None if d is None else _batch(d), alpha, beta).reshape(shape)


@torch.no_grad()
def newton_schulz(
    x: Tensor,
    steps: int = 5,
    coefficients: str | Sequence[Sequence[float]] = "simple",
    *,
    form: str = "auto",
    restarts: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    eps: float = 1e-7,
    square_sums: Tensor | None = None,
) -> Tensor:
    """U S' V^T for x = U S V^T, with S' near 1: steps of X <- a X + (b A + c A^2) X, A = X X^T, from x / max(|x|_F, eps).

    x [.., m, n] of any strides, bf16, fp16, fp32 or fp64; each matrix is taken by itself, the result is contiguous and has x's dtype.
        All matrices of a call share launches: give those of one shape together.
    coefficients: "simple" (Keller Jordan's triple), "quintic" (five triples), "polar_express" (arXiv 2505.16932), as Megatron and
        emerging_optimizers name them, or triples (a, b, c) of your own, one a step, in a cycle. `newton_schulz_coefficients.singular_value_interval`
        tells where S' lies.
    form: "standard", "gram" (iterates on x x^T: fewer multiply-adds for matrices that are not square) or "auto" (newton_schulz_plan.make_plan).
    restarts: steps before which the Gram form restarts; None: `newton_schulz_plan.default_restarts`. A Gram form without restarts can overflow.
    dtype: of the matrices inside: float16 (default on GPUs; 8 times as exact as bfloat16 and as fast, kept in range by powers of two),
        bfloat16 (as torch.optim.Muon), float32 (default where plain torch runs on a CPU) or float64.
    square_sums: None or fp32 [number of matrices], their sums of squares, as `muon_momentum_` gives them: saves reading x once.

    Not differentiable. Raises ValueError for arguments that are none of these. Zero matrices stay zero, NaN and infinity spread in their own matrix.
    """
    _check("newton_schulz", "x", x)
    triples = coefficient_triples(coefficients, steps)
    if dtype is None:
        dtype = (
            x.dtype
            if x.dtype == torch.float64
            else torch.float16
            if backend.backend_for(x.device) != "torch" or x.is_cuda
            else torch.float32
        )
    if dtype not in INPUT_DTYPES:
        raise ValueError(
            f"hip_ops.newton_schulz: dtype is {dtype}; it must be None or one of {', '.join(map(str, INPUT_DTYPES))}"
        )
    plan = make_plan(triples, *x.shape[-2:], form=form, restarts=restarts, dtype=dtype)
    batched = _batch(x)
    if square_sums is not None and (
        square_sums.shape != batched.shape[:1] or square_sums.device != x.device or not square_sums.is_floating_point()
    ):
        raise ValueError(
            f"hip_ops.newton_schulz: square_sums is {square_sums.dtype} {tuple(square_sums.shape)} on {square_sums.device}; "
            f"it must be torch.float32 ({batched.shape[0]},) on {x.device}, one a matrix"
        )
    if x.numel() == 0:
        return x.new_empty(x.shape)
    if not triples:
        norms = torch.linalg.vector_norm(
            x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)
        )
        return (x / norms.clamp_min(eps)).to(x.dtype).contiguous()
    flat = [value for triple in plan.triples for value in triple]
    return _newton_schulz_op(batched, square_sums, flat, plan.form, plan.restarts, plan.dtype, eps).reshape(x.shape)


@torch.no_grad()
def orthogonalize_many(matrices: Iterable[Tensor], *, max_batch_elements: int = 2**28, **options) -> list[Tensor]:
    """`newton_schulz` of every matrix [m, n] in the list, in its order; matrices of one shape, device and dtype share batches.

    A tall matrix goes with the wide ones of the transposed shape. No batch has more than max_batch_elements elements (or one matrix), which
    bounds the memory beside inputs and results to about 8 times that many 16-bit numbers. options: those of `newton_schulz`.
    """
    matrices = list(matrices)
    groups: dict[tuple, list[int]] = {}
    for i, matrix in enumerate(matrices):
        if matrix.ndim != 2:
            raise ValueError(
                f"hip_ops.orthogonalize_many: matrices[{i}] has shape {tuple(matrix.shape)}; it must be (m, n)"
            )
        groups.setdefault((*sorted(matrix.shape), matrix.dtype, matrix.device), []).append(i)
    results: list[Tensor | None] = [None] * len(matrices)
    for (n, m, _, _), members in groups.items():
        share = max(1, max_batch_elements // max(1, n * m))
        for start in range(0, len(members), share):
            part = members[start : start + share]
            wide = [matrices[i].mT if matrices[i].shape[0] > matrices[i].shape[1] else matrices[i] for i in part]
            # One tall shape alone keeps its orientation: the kernels read it by columns, and nothing is copied twice.
            all_tall = all(matrices[i].shape[0] > matrices[i].shape[1] for i in part)
            batch = torch.stack([matrices[i] for i in part] if all_tall else wide)
            done = newton_schulz(batch, **options)
            for i, result in zip(part, done.unbind(0), strict=True):
                results[i] = result if result.shape == matrices[i].shape else result.mT.contiguous()
    return results
