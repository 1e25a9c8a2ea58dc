# SPDX-License-Identifier: Apache-2.0
"""Residual merge + RMSNorm or LayerNorm in plain torch operations, forward and backward written out.

RMSNorm: the order of the operations is that of eager autograd over `torch.nn.functional.rms_norm` (arXiv 1910.07467)
and `torch.addcmul`, so that on a CPU in fp32 a model gives the same losses, bit for bit, with these functions as with
its own. LayerNorm (arXiv 1607.06450): the variance is the mean square of what is left without the mean.

Statistics are of the residual *as stored*: where the residual is bf16, new_residual is rounded first and its rounded
values are squared (as transformers' and Liger's add + norm; quack takes them before rounding). All arithmetic is fp32,
or fp64 for fp64 tensors, and each result is rounded once, at its end. All versions follow this.

Arguments are made contiguous first: torch's loops on a CPU sum strided rows in another order.

Shapes: x, output, residual, new_residual, y and their gradients [..., h]; vectors [h]; mean and rstd [..., 1].
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


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension (arXiv 1607.06450); x [..., h], weight
    and bias [h], in weight's dtype.
    """
    return _center_and_normalize(x, weight, bias, eps)[0]


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


def affine_layer_norm(
    x: Tensor, bias: Tensor, scale: Tensor, weight: Tensor, norm_bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`affine` and its LayerNorm with `weight` and `norm_bias`."""
    stream = affine(x, bias, scale, dtype)
    return stream, layer_norm(stream, weight, norm_bias, eps)


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
    new_residual = _added(x, residual)
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
    return *_summand_gradients(total, new_residual.dtype, x_dtype), d_weight


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y in weight's dtype, new_residual = x + residual in residual's, its mean, rstd = 1 / sqrt(var + eps)."""
    new_residual = _added(x, residual)
    y, mean, rstd = _center_and_normalize(new_residual, weight, bias, eps)
    return y, new_residual, mean, rstd


def add_layer_norm_backward(
    dy: Tensor,
    d_new_residual: Tensor | None,
    new_residual: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    x_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """d_residual, d_x, d_weight, d_bias; d_residual and d_x as in add_rms_norm_backward."""
    total, d_weight, d_bias = _through_layer_norm(dy, d_new_residual, new_residual, mean, rstd, weight)
    return *_summand_gradients(total, new_residual.dtype, x_dtype), d_weight, d_bias


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


def scaled_residual_layer_norm(
    output: Tensor,
    residual: Tensor,
    output_bias: Tensor,
    output_scale: Tensor,
    residual_bias: Tensor,
    residual_scale: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y, new_residual as in scaled_residual_rms_norm, mean, rstd."""
    output, residual = output.contiguous(), residual.contiguous()
    new_residual = scale_residual(output, residual, output_bias, output_scale, residual_bias, residual_scale)
    y, mean, rstd = _center_and_normalize(new_residual, weight, bias, eps)
    return y, new_residual, mean, rstd


def scaled_residual_layer_norm_backward(
    dy: Tensor,
    d_new_residual: Tensor | None,
    output: Tensor,
    residual: Tensor,
    mean: Tensor,
    rstd: Tensor,
    output_bias: Tensor,
    output_scale: Tensor,
    residual_bias: Tensor,
    residual_scale: Tensor,
    weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients as of scaled_residual_rms_norm_backward, then that of bias."""
    output, residual = output.contiguous(), residual.contiguous()
    vectors = (output_bias, output_scale, residual_bias, residual_scale)
    new_residual = scale_residual(output, residual, *vectors)
    total, d_weight, d_bias = _through_layer_norm(dy, d_new_residual, new_residual, mean, rstd, weight)
    return *merge_gradients(total, output, residual, *vectors), d_weight, d_bias


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


def _added(x: Tensor, residual: Tensor) -> Tensor:
    compute, x, residual = wide(residual.dtype), x.contiguous(), residual.contiguous()
    return (x.to(compute) + residual.to(compute)).to(residual.dtype)


def _summand_gradients(total: Tensor, residual_dtype: torch.dtype, x_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    d_x = total.to(x_dtype) if x_dtype != residual_dtype else total.new_empty(0, dtype=x_dtype)
    return total.to(residual_dtype), d_x


def _normalize(new_residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    value = new_residual.to(wide(new_residual.dtype))
    rstd = torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + eps)
    return (value * rstd * weight.to(value.dtype)).to(weight.dtype), rstd


def _center_and_normalize(
    new_residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    value = new_residual.to(wide(new_residual.dtype))
    mean = value.mean(-1, keepdim=True)
    centered = value - mean
    rstd = torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps)
    y = torch.addcmul(bias.to(value.dtype), centered * rstd, weight.to(value.dtype))
    return y.to(weight.dtype), mean, rstd


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


def _through_layer_norm(dy, d_new_residual, new_residual, mean, rstd, weight) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradient of new_residual through both outputs, in the compute dtype, and those of weight and bias."""
    compute = rstd.dtype
    normalized = (new_residual.contiguous().to(compute) - mean) * rstd
    dy = dy.contiguous().to(compute)
    d_normalized = dy * weight.to(compute)
    d_weight = (dy * normalized).sum_to_size(weight.shape).to(weight.dtype)
    d_bias = dy.sum_to_size(weight.shape).to(weight.dtype)
    projection = (d_normalized * normalized).mean(-1, keepdim=True)
    total = (d_normalized - d_normalized.mean(-1, keepdim=True) - normalized * projection) * rstd
    if d_new_residual is not None:
        total = d_new_residual.contiguous().to(compute) + total
    return total, d_weight, d_bias
