# SPDX-License-Identifier: Apache-2.0
"""Gradients of a layer's vectors, added to Megatron's main gradients together.

DDP's hook adds each gradient with a kernel of its own: 13 a layer and micro-batch at 3 us each. Here the layer uses its
vectors through one autograd function, whose backward pass runs when all their gradients have arrived and adds them in
two launches. In a step of 40 layers as a graph on H200s that takes 2.0 instead of 13.0 ms (`gradients`, backward, in
benchmarks/results/step40-h200-graphs.json and, before it, step40-2xh200-graphs.json). Each sum has DDP's order, so the
bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from hip_ops.runtime.main_grad import handed_over, main_grad_of

ParameterView = Callable[[Tensor], Tensor]  # from a parameter to the tensor to compute with


def direct(parameter: Tensor) -> Tensor:
    """Return the parameter itself: the view that leaves its gradient to autograd."""
    return parameter


class ViewTogether(torch.autograd.Function):
    """Return the parameters, sharing their memory. The backward pass adds the gradients that arrive to `main_grad` and
    marks that for DDP.
    """

    @staticmethod
    def forward(ctx, *parameters):
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters
        return tuple([parameter.detach() for parameter in parameters])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        totals = [main_grad_of(p) for p, g in zip(ctx.parameters, gradients, strict=True) if g is not None]
        if totals:
            add_together_(totals, [gradient for gradient in gradients if gradient is not None])
        return tuple([None if g is None else handed_over(p) for p, g in zip(ctx.parameters, gradients, strict=True)])


def add_together_(totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Compute totals[i] += parts[i], all parts in one dtype. Two launches on an accelerator, one where the totals have
    that dtype too.
    """
    parts, wide_dtype = [part.contiguous() for part in parts], torch.promote_types(parts[0].dtype, totals[0].dtype)
    if parts[0].dtype != wide_dtype:
        # torch adds tensors of two dtypes one by one, but converts them together.
        wide = _unflatten_dense_tensors(
            parts[0].new_empty(sum(part.numel() for part in parts), dtype=wide_dtype), parts
        )
        torch._foreach_copy_(wide, parts)
        parts = wide
    torch._foreach_add_(totals, parts)


def view_together(parameters: Iterable[Tensor]) -> ParameterView:
    """Return a function that maps each of `parameters` to the tensor to compute with, and any other tensor to itself.

    A parameter without a main gradient, or that needs no gradient, is mapped to itself. The others may be used through
    the function any number of times but not directly, since DDP drops gradients that reach them otherwise. They may not
    be used inside a part of the model that is recomputed by itself: its backward pass runs within the other one and
    would find only some of the gradients. Not for matrices: one block of threads adds up to 65,536 elements.
    """
    if not torch.is_grad_enabled():
        return direct
    with_main_grad = [p for p in parameters if p.requires_grad and main_grad_of(p) is not None]
    if not with_main_grad:
        return direct
    views = dict(zip(with_main_grad, ViewTogether.apply(*with_main_grad), strict=True))
    return lambda parameter: views.get(parameter, parameter)
