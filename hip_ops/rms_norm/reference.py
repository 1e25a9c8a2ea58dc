# SPDX-License-Identifier: Apache-2.0
"""Residual merge + RMSNorm in plain torch operations, forward and backward written out.

The order of the operations is that of eager autograd over `torch.nn.functional.rms_norm` (arXiv 1910.07467) and
`torch.addcmul`, so that on a CPU in fp32 a model gives the same losses, bit for bit, with these functions as with its
own.

Statistics are of the residual *as stored*: where the residual is bf16, new_residual is rounded first and its rounded
values are squared (as transformers' and Liger's add + norm; quack takes them before rounding). All arithmetic is fp32,
or fp64 for fp64 tensors, and each result is rounded once, at its end. All versions follow this.

Arguments are made contiguous first: torch's loops on a CPU sum strided rows in another order.

Shapes: x, output, residual, new_residual, y and their gradients [..., h]; vectors [h]; rstd [..., 1].
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.runtime.declaration import wide


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467); x [..., h], weight [h], in
    weight's dtype.
    """
    return _normalize(x, weight, eps)[0]


def affine(x: Tensor, bias: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(x + bias) * scale, rounded to `dtype`; x [..., h], bias and scale [h]. The scale comes after the bias, as the
    released weights are stored.
    """
    return ((x.to(wide(x.dtype)) + bias) * scale).to(dtype)


def affine_rms_norm(
    x: Tensor, bias: Tensor, scale: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`affine` and its RMSNorm. Compiled, they are one kernel that adds the two gradients of the stream."""
    stream = affine(x, bias, scale, dtype)
    return stream, rms_norm(stream, weight, eps)


def scale_residual(
    output: Tensor,
    residual: Tensor,
    output_bias: Tensor,
    output_scale: Tensor,
    residual_bias: Tensor,
    residual_scale: Tensor,
) -> Tensor:
    """(output + output_bias) * output_scale + (residual + residual_bias) * residual_scale, rounded to residual's dtype.

    Multiplied out: the biases become one vector, and each operand is read once.
    """
    compute = wide(residual.dtype)
    b_o, s_o, b_x, s_x = (v.to(compute) for v in (output_bias, output_scale, residual_bias, residual_scale))
    shift = b_o * s_o + b_x * s_x
    return torch.addcmul(torch.addcmul(shift, output.to(compute), s_o), residual.to(compute), s_x).to(residual.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """y in weight's dtype, new_residual = x + residual in residual's, rstd = 1 / sqrt(mean(new_residual^2) + eps)."""
    compute, x, residual = wide(residual.dtype), x.contiguous(), residual.contiguous()
    new_residual = (x.to(compute) + residual.to(compute)).to(residual.dtype)
    y, rstd = _normalize(new_residual, weight, eps)
    return y, new_residual, rstd


def add_rms_norm_backward(
    dy: Tensor, d_new_residual: Tensor | None, new_residual: Tensor, rstd: Tensor, weight: Tensor, x_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """d_residual, d_x in x_dtype, d_weight. d_new_residual None means zeros.

    x and residual have the same gradient: where their dtypes agree it is returned once, as d_residual, and d_x is an
    empty tensor.
    """
    total, d_weight = _through_norm(dy, d_new_residual, new_residual, rstd, weight)
    d_x = total.to(x_dtype) if x_dtype != new_residual.dtype else total.new_empty(0, dtype=x_dtype)
    return total.to(new_residual.dtype), d_x, d_weight


def scaled_residual_rms_norm(
    output: Tensor,
    residual: Tensor,
    output_bias: Tensor,
    output_scale: Tensor,
    residual_bias: Tensor,
    residual_scale: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """y, new_residual = (output + output_bias) * output_scale + (residual + residual_bias) * residual_scale, rstd."""
    output, residual = output.contiguous(), residual.contiguous()
    new_residual = scale_residual(output, residual, output_bias, output_scale, residual_bias, residual_scale)
    y, rstd = _normalize(new_residual, weight, eps)
    return y, new_residual, rstd


def scaled_residual_rms_norm_backward(
    dy: Tensor,
    d_new_residual: Tensor | None,
    output: Tensor,
    residual: Tensor,
    rstd: Tensor,
    output_bias: Tensor,
    output_scale: Tensor,
    residual_bias: Tensor,
    residual_scale: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of output, residual, the four vectors in the order of the arguments, and weight.

    new_residual is merged again from output and residual, which the gradients of the scales need anyway: reading it
    would cost another 4 bytes an element, and getting sum(g * residual) from it a division by residual_scale.
    """
    output, residual = output.contiguous(), residual.contiguous()
    new_residual = scale_residual(output, residual, output_bias, output_scale, residual_bias, residual_scale)
    total, d_weight = _through_norm(dy, d_new_residual, new_residual, rstd, weight)
    vectors = (output_bias, output_scale, residual_bias, residual_scale)
    return *merge_gradients(total, output, residual, *vectors), d_weight


def merge_gradients(
    total: Tensor,
    output: Tensor,
    residual: Tensor,
    output_bias: Tensor,
    output_scale: Tensor,
    residual_bias: Tensor,
    residual_scale: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of output, residual and the four vectors from `total`, that of new_residual in the compute dtype."""
    compute = total.dtype
    b_o, s_o, b_x, s_x = (v.to(compute) for v in (output_bias, output_scale, residual_bias, residual_scale))
    d_shift = total.sum_to_size(output_bias.shape)
    vectors = (
        d_shift * s_o,
        (total * output.to(compute)).sum_to_size(output_bias.shape) + d_shift * b_o,
        d_shift * s_x,
        (total * residual.to(compute)).sum_to_size(output_bias.shape) + d_shift * b_x,
    )
    d_output, d_residual = (total * s_o).to(output.dtype), (total * s_x).to(residual.dtype)
    return d_output, d_residual, *(v.to(output_bias.dtype) for v in vectors)


def _normalize(new_residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    value = new_residual.to(wide(new_residual.dtype))
    rstd = torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
    return (value * rstd * weight.to(value.dtype)).to(weight.dtype), rstd


def _through_norm(dy, d_new_residual, new_residual, rstd, weight) -> tuple[Tensor, Tensor]:
    """Returns the gradient of new_residual through both outputs, in the compute dtype, and the gradient of weight."""
    value = new_residual.contiguous().to(rstd.dtype)
    dy = dy.contiguous().to(rstd.dtype)
    d_normalized = dy * weight.to(rstd.dtype)
    d_weight = (dy * (value * rstd)).sum_to_size(weight.shape).to(weight.dtype)
    d_rstd = (d_normalized * value).sum(-1, keepdim=True)
    d_mean_square = -0.5 * rstd.pow(3) * d_rstd
    total = d_normalized * rstd
    if d_new_residual is not None:
        total = d_new_residual.contiguous().to(rstd.dtype) + total
    return total + d_mean_square / value.shape[-1] * (2.0 * value), d_weight
