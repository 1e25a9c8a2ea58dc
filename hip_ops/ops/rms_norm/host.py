# SPDX-License-Identifier: Apache-2.0
"""Shared by the host sides of the kernels: rows, results, and the functions of hip_ops.ops.rms_norm.reference.

One forward and one backward kernel compute both forms: with four vectors ZAYA's merge, without them the plain addition.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def empty_results(x: Tensor, residual: Tensor, weight: Tensor, centered: bool = False) -> tuple[Tensor, ...]:
    """Allocates y [..., h] in weight's dtype, new_residual [..., h] in residual's and, [..., 1] in fp32, rstd or mean
    and rstd, contiguous.
    """
    y = torch.empty(x.shape, dtype=weight.dtype, device=x.device)
    new_residual = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
    statistics = (torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device) for _ in range(1 + centered))
    return y, new_residual, *statistics


def functions(forward: Callable, backward: Callable) -> tuple[Callable, Callable, Callable, Callable]:
    """Returns add_rms_norm, add_rms_norm_backward, scaled_residual_rms_norm and scaled_residual_rms_norm_backward of a
    version, with the arguments of hip_ops.ops.rms_norm.reference.

    forward(x, residual, vectors, weight, eps) -> y, new_residual, rstd.
    backward(dy, d_new_residual, x, residual, rstd, vectors, weight, x_dtype) -> d_x, d_residual, gradients of vectors
    and weight; without vectors x is None and residual new_residual, and d_x is empty where the dtypes of x and residual
    agree.
    """

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        return forward(x, residual, (), weight, eps)

    def add_rms_norm_backward(dy, d_new_residual, new_residual, rstd, weight, x_dtype) -> tuple[Tensor, Tensor, Tensor]:
        d_x, d_residual, d_weight = backward(dy, d_new_residual, None, new_residual, rstd, (), weight, x_dtype)
        return d_residual, d_x, d_weight

    def scaled_residual_rms_norm(output, residual, *rest) -> tuple[Tensor, Tensor, Tensor]:
        *vectors, weight, eps = rest
        return forward(output, residual, tuple(vectors), weight, eps)

    def scaled_residual_rms_norm_backward(dy, d_new_residual, output, residual, rstd, *vectors) -> tuple[Tensor, ...]:
        return backward(dy, d_new_residual, output, residual, rstd, vectors[:-1], vectors[-1], output.dtype)

    return add_rms_norm, add_rms_norm_backward, scaled_residual_rms_norm, scaled_residual_rms_norm_backward


def layer_norm_functions(forward: Callable, backward: Callable) -> tuple[Callable, Callable, Callable, Callable]:
    """Returns add_layer_norm, add_layer_norm_backward, scaled_residual_layer_norm and its backward of a version.

    `forward` and `backward` are those of `functions` with one more argument: the forward has a bias and returns mean
    and rstd, the backward has the mean and returns the gradient of bias behind that of weight.
    """

    def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, ...]:
        return forward(x, residual, (), weight, eps, bias)

    def add_layer_norm_backward(dy, d_new_residual, new_residual, mean, rstd, weight, x_dtype) -> tuple[Tensor, ...]:
        d_x, d_residual, *of_norm = backward(dy, d_new_residual, None, new_residual, rstd, (), weight, x_dtype, mean)
        return d_residual, d_x, *of_norm

    def scaled_residual_layer_norm(output, residual, *rest) -> tuple[Tensor, ...]:
        *vectors, weight, bias, eps = rest
        return forward(output, residual, tuple(vectors), weight, eps, bias)

    def scaled_residual_layer_norm_backward(
        dy, d_new_residual, output, residual, mean, rstd, *vectors
    ) -> tuple[Tensor, ...]:
        return backward(dy, d_new_residual, output, residual, rstd, vectors[:-1], vectors[-1], output.dtype, mean)

    return add_layer_norm, add_layer_norm_backward, scaled_residual_layer_norm, scaled_residual_layer_norm_backward
