# SPDX-License-Identifier: Apache-2.0
"""Adds weight gradients to Megatron's main gradients in the matrix product that computes them.

Megatron's DDP gives every parameter an fp32 `main_grad` in its buffer. Autograd rounds the product to bf16 and stores
it; another pass reads both and writes the sum: 12 bytes per element. With these functions the product itself adds in
fp32, and nothing is rounded. Megatron's `gradient_accumulation_fusion` does the same with a compiled extension.

DDP's hooks run when autograd passes a gradient to the parameter, so the backward function must return a tensor.
`handed_over` returns one that shares the weight's memory: autograd sets it as `grad` without a copy, because it is a
new object of the right layout. DDP does not read it, because `grad_added_to_main_grad` is set, and drops it.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from hip_ops.runtime.operator import OPERATORS, Operator, all_operators

logger = logging.getLogger("hip_ops")
PIECE_ELEMENTS = 2**12  # of a gradient that is added with others
ROUNDED_ELEMENTS = 2**25  # of a product that is rounded before it is added: 64 MiB, where the head's would be 1 GiB


def main_grad_of(weight: Tensor) -> Tensor | None:
    """Return the weight's gradient in Megatron's buffer, or None where DDP keeps none or has no flag
    `grad_added_to_main_grad`.
    """
    return getattr(weight, "main_grad", None) if hasattr(weight, "grad_added_to_main_grad") else None


def handed_over(weight: Tensor) -> Tensor | None:
    """Set DDP's flag on a weight whose gradient was added to `main_grad`. Return the value that its backward function
    returns: a view of the weight as a placeholder, which DDP does not read.

    It is None where a second use of the weight in the same graph has its gradient still to come (`zero_out_wgrad`,
    which Megatron sets on an embedding that is also the head's matrix): that gradient runs DDP's hook, and DDP adds it.
    """
    if getattr(weight, "zero_out_wgrad", False):
        return None
    weight.grad_added_to_main_grad = True
    return weight.detach()


def handed_over_block(weights: Sequence[Tensor], block: Tensor) -> tuple[Tensor | None, ...]:
    """Return `handed_over` for the matrices of `block` [len(weights), out, in], with all views made in one call of
    torch.
    """
    if any([getattr(weight, "zero_out_wgrad", False) for weight in weights]):
        return tuple(map(handed_over, weights))
    for weight in weights:
        weight.grad_added_to_main_grad = True
    return block.unbind()


def add_product(weight: Tensor, a: Tensor, b: Tensor) -> Tensor | None:
    """Add a^T b to weight.main_grad in fp32. a [T, out] and b [T, in] in the weight's dtype, rows may be strided.

    Return the value for the backward function to return as the weight's gradient [out, in]: `handed_over`, or without
    a main gradient the gradient itself, rounded as autograd rounds it. For a product in pieces: `add_product_` per
    piece, then `handed_over` once.
    """
    total = main_grad_of(weight)
    if total is None:
        return a.t() @ b
    add_products_([total], a, b)
    return handed_over(weight)


def add_products_(totals: Sequence[Tensor], a: Tensor, b: Tensor) -> None:
    """Add a_i^T b to totals[i], where a_i are consecutive columns of a, as many as totals[i] has rows.

    On a GPU several products become one product and one pass of additions, because products as small as 128 x 2048
    leave most of the device idle. `way_of_adding` says what is rounded.
    """
    sizes, ways = [len(total) for total in totals], {way_of_adding(total, a) for total in totals}
    if ways == {"rounded"}:
        for total, part in zip(totals, (a.t() @ b).split(sizes), strict=True):
            add_in_place(total, part)
    elif ways <= {"addmm", "mm"} and len(totals) > 1:
        torch._foreach_add_(list(totals), torch.ops.aten.mm.dtype(a.t(), b, torch.float32).split(sizes))
    else:
        for total, columns in zip(totals, a.split(sizes, dim=1), strict=True):
            add_product_(total, columns, b)


def add_gradients(weights: Sequence[Tensor | None], gradients: Sequence[Tensor]) -> list[Tensor | None]:
    """Add each gradient to its weight's main_grad, where the weight is not None. Return the values for the backward
    function, as `add_product`.
    """
    totals = [None if weight is None else main_grad_of(weight) for weight in weights]
    direct = [(total, gradient) for total, gradient in zip(totals, gradients, strict=True) if total is not None]
    if direct:  # in pieces, because torch adds up to 65,536 elements of a tensor in one block of threads
        pieces = (zip(*(tensor.view(-1).split(PIECE_ELEMENTS) for tensor in pair), strict=True) for pair in direct)
        torch._foreach_add_(*map(list, zip(*itertools.chain(*pieces), strict=True)))
    return [
        None if weight is None else gradient.to(weight.dtype) if total is None else handed_over(weight)
        for weight, total, gradient in zip(weights, totals, gradients, strict=True)
    ]


def add_in_place(total: Tensor, part: Tensor) -> None:
    """Add part [...] to total [...]; to an fp32 one by the operator `add_gradient_`."""
    if total.dtype == torch.float32:
        _addition()(total, part)
    else:
        total.add_(part)


@functools.cache
def _addition() -> Operator:
    """Return the operator; imported at the first use, because operators are built on this folder."""
    all_operators()
    return OPERATORS["add_gradient_"]


class MainGradLinear(torch.autograd.Function):
    """x [..., in] times the rows of several weights [out_i, in], as F.linear of all rows in one matrix -> [..., sum of
    out_i].

    Weight gradients go through `add_product`, each from its columns of the output's gradient. The joined matrix is kept
    for the backward pass.
    """

    @staticmethod
    def forward(ctx, x, *weights):
        joined = weights[0] if len(weights) == 1 else torch.cat(weights)
        ctx.save_for_backward(x, joined)
        ctx.weights = weights  # parameters themselves: saved tensors lose the attributes that DDP sets
        # Two dimensions: for [s, 1, h] whose batch of one has an odd stride, as after an embedding, torch computes s
        # products of one row.
        return F.linear(x.flatten(0, -2), joined).view(*x.shape[:-1], len(joined))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        x, joined = ctx.saved_tensors
        grad_x = grad @ joined if ctx.needs_input_grad[0] else None
        grads, rows = grad.flatten(0, -2), x.flatten(0, -2)
        totals = [main_grad_of(weight) for weight in ctx.weights]
        if all(ctx.needs_input_grad[1:]) and not any(total is None for total in totals):
            add_products_(totals, grads, rows)
            return grad_x, *map(handed_over, ctx.weights)
        pieces = grads.split([len(weight) for weight in ctx.weights], dim=1)
        needed = ctx.needs_input_grad[1:]
        return grad_x, *(
            add_product(weight, piece, rows) if need else None
            for weight, piece, need in zip(ctx.weights, pieces, needed, strict=True)
        )


def main_grad_linear(x: Tensor, *weights: Tensor) -> Tensor:
    """Return F.linear(x, torch.cat(weights)). The weight gradients are added to `main_grad`, or, without one, go
    through plain autograd. Frozen weights get none.
    """
    frozen = torch.is_grad_enabled() and x.requires_grad and not any(weight.requires_grad for weight in weights)
    if not frozen and any(main_grad_of(weight) is None for weight in weights):
        return F.linear(x, weights[0] if len(weights) == 1 else torch.cat(weights))
    return MainGradLinear.apply(x, *weights)


def way_of_adding(total: Tensor, a: Tensor) -> str:
    """Return how total += a^T b is computed.

    "same": one dtype. "addmm", "mm": by a product into fp32 (`fp32_product`). "rounded": on a GPU without such a
    product; it is rounded to a's dtype before the addition, as in autograd, because a product of fp32 operands has an
    eighth of the rate. "converted": elsewhere, by a product of operands in total's dtype.
    """
    if total.dtype == a.dtype:
        return "same"
    if not a.is_cuda or total.dtype != torch.float32:
        return "converted"
    return fp32_product(a.device, a.dtype) or "rounded"


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add a^T b to total in place. a [T, m] and b [T, n] of one dtype; total [m, n] of that dtype, or fp32, where
    nothing is rounded before the sum unless `way_of_adding` is "rounded".
    """
    way = way_of_adding(total, a)
    if way == "same":
        return total.addmm_(a.t(), b)
    if way == "addmm":
        return torch.ops.aten.addmm.dtype_out(total, a.t(), b, torch.float32, out=total)
    if way == "mm":
        return total.add_(torch.ops.aten.mm.dtype(a.t(), b, torch.float32))
    if way == "converted":
        return total.addmm_(a.t().to(total.dtype), b.to(total.dtype))
    rows = max(1, ROUNDED_ELEMENTS // max(1, total.shape[1]))
    for piece, columns in zip(total.split(rows), a.split(rows, dim=1), strict=True):
        add_in_place(piece, columns.t() @ b)
    return total


@functools.cache
def fp32_product(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return how `device` multiplies matrices of `dtype` into fp32: "addmm" also adds in place, "mm" only multiplies,
    None: not supported.

    The result comes from one trial on small numbers and is logged. Raises RuntimeError while a graph is captured.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "hip_ops: the first product into fp32 came while a graph is captured; run it once before the capture"
        )
    a = (torch.arange(32, device=device).reshape(4, 8) / 32).to(dtype)
    exact = a.double().t() @ a.double() + 1 / 1024  # exact in fp32 and not in bf16
    ways = {
        "addmm": lambda: torch.ops.aten.addmm.dtype_out(total, a.t(), a, torch.float32, out=total),
        "mm": lambda: torch.ops.aten.mm.dtype(a.t(), a, torch.float32) + 1 / 1024,
    }
    failed = []
    for how, run in ways.items():
        total = torch.full((8, 8), 1 / 1024, device=device)
        try:
            right = torch.equal(run().double(), exact) and torch.equal(ways["mm"]().double(), exact)
        except (AttributeError, RuntimeError, TypeError) as error:  # this torch or device does not support it
            failed.append(f"{how}: {str(error).splitlines()[0]}")
            continue
        if right:
            logger.info(
                "hip_ops: products of %s on %s come in fp32, weight gradients are summed by %s with out_dtype",
                dtype,
                device,
                how,
            )
            return how
        failed.append(f"{how}: wrong numbers")
    logger.warning(
        "hip_ops: products of %s on %s are rounded to it before they are added to fp32 weight gradients; %s",
        dtype,
        device,
        "; ".join(failed),
    )
    return None
