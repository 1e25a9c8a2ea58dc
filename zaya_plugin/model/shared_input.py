# SPDX-License-Identifier: Apache-2.0
"""A linear layer whose input has one other reader: its backward product adds to the other reader's gradient of the
input.

Autograd would store the product, and another pass would read both gradients and write their sum: 8.0 ms of a step of 40
layers on H200s, where the product that adds takes 1.9 ms longer (`router` in benchmarks/results/step40-h200-graphs.json
and, before it, step40-2xh200-graphs.json).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hip_ops.runtime.main_grad import add_product, main_grad_linear


class InputAndLinear(torch.autograd.Function):
    """x [..., in] and weight [out, in] -> x again, for the other reader, and x W^T.

    The gradient of the first result is overwritten, so no other code may hold that tensor. Autograd does not check
    this; see `input_and_linear`.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # the parameter itself: a saved tensor loses the attributes that DDP sets
        ctx.set_materialize_grads(False)
        return x.view_as(x), F.linear(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_x, grad):
        if grad is None:
            return grad_x, None
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_weight = add_product(ctx.weight, rows, x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        if grad_x is None or not ctx.needs_input_grad[0]:
            return grad @ weight if ctx.needs_input_grad[0] else None, grad_weight
        if grad_x.is_contiguous() and not grad_x.requires_grad:
            into = grad_x.view(-1, grad_x.shape[-1])
            torch.addmm(into, rows, weight, out=into)
        else:  # it belongs to a graph of the backward pass, or it is an expanded tensor
            grad_x = grad_x + grad @ weight
        return grad_x, grad_weight


def input_and_linear(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return x for its other reader and F.linear(x, weight), whose gradients go to `main_grad` and into the other
    reader's gradient of x.

    Conditions: the other reader is one function, directly or behind views; its backward allocates the gradient (a
    gather of rows does; an addition, which returns one tensor for both operands, does not); the first result has no
    other use: no hook, no second reader, no return to a caller. Not differentiable twice.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x, main_grad_linear(x, weight)
    return InputAndLinear.apply(x, weight)
