# SPDX-License-Identifier: Apache-2.0
"""Gradients of a layer's vectors, added to Megatron's main gradients together.

DDP's hook adds each gradient by a kernel of its own: a dozen a layer and micro-batch that take 3 us each on an H200 whatever their size,
and the host's time for as many calls. Here the layer reads its vectors through one autograd function, whose backward pass runs when the last
of their gradients has come, and adds them all in two launches. The sums are DDP's, each in the same order: the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch._utils import _unflatten_dense_tensors

from hip_ops.runtime.main_grad import handed_over, main_grad_of

Read = Callable[[Tensor], Tensor]


def as_it_is(parameter: Tensor) -> Tensor:
    """The `Read` that leaves a parameter's gradient to autograd."""
    return parameter


class ReadTogether(torch.autograd.Function):
    """Parameters as they are, sharing their memory. What gradients come are added to `main_grad`; DDP is told."""

    @staticmethod
    def forward(ctx, *parameters):
        ctx.set_materialize_grads(False)
        ctx.parameters = parameters
        return tuple([parameter.detach() for parameter in parameters])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        came = [
            (parameter, gradient)
            for parameter, gradient in zip(ctx.parameters, gradients, strict=True)
            if gradient is not None
        ]
        if came:
            add_together_([main_grad_of(parameter) for parameter, _ in came], [gradient for _, gradient in came])
        return tuple([None if g is None else handed_over(p) for p, g in zip(ctx.parameters, gradients, strict=True)])


def add_together_(totals: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """totals[i] += parts[i], all parts in one dtype. Two launches on an accelerator, one where the totals have that dtype too."""
    parts, wide_dtype = [part.contiguous() for part in parts], torch.promote_types(parts[0].dtype, totals[0].dtype)
    if parts[0].dtype != wide_dtype:
        # Tensors of two dtypes torch adds one by one; it converts them together.
        wide = _unflatten_dense_tensors(
            parts[0].new_empty(sum(part.numel() for part in parts), dtype=wide_dtype), parts
        )
        torch._foreach_copy_(wide, parts)
        parts = wide
    torch._foreach_add_(totals, parts)


def read_together(parameters: Iterable[Tensor]) -> Read:
    """How to read `parameters`: a function that gives for each what to compute with, and for any other tensor that tensor.

    A parameter without a main gradient, or that gets no gradient, it gives as it is. The others may be used through it as often as you like,
    but in no other way, as DDP drops what else autograd brings, and not inside a part of the model that is recomputed by itself: its backward
    pass, a pass within the other, would find some of the gradients only. Not for matrices: one block of threads adds up to 65,536 elements.
    """
    if not torch.is_grad_enabled():
        return as_it_is
    direct = [parameter for parameter in parameters if parameter.requires_grad and main_grad_of(parameter) is not None]
    if not direct:
        return as_it_is
    given = dict(zip(direct, ReadTogether.apply(*direct), strict=True))
    return lambda parameter: given.get(parameter, parameter)
