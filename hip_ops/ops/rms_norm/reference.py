# SPDX-License-Identifier: Apache-2.0
"""Residual merge + RMSNorm or LayerNorm in plain torch operations, forward and backward written out.

RMSNorm: the order of the operations is that of eager autograd over `torch.nn.functional.rms_norm` (arXiv 1910.07467)
and `torch.addcmul`, so that on a CPU in fp32 a model gives the same losses, bit for bit, with these functions as with
its own. LayerNorm (arXiv 1607.06450): the variance is the mean square of what is left without the mean.

Statistics are of the residual *as stored*: where the residual is bf16, new_residual is rounded first and its rounded
values are squared (as transformers' and Liger's add + norm; quack takes them before rounding). All arithmetic is fp32,
or fp64 for fp64 tensors, and each result is rounded once, at its end. All versions follow this.

Arguments are made contiguous first: torch's loops on a CPU sum strided rows in another order.

Shapes: x, output, residual, new_residual, y and their gradients [..., h]; vectors [h]; mean and rstd [..., 1]. Pairs
are (normed, stream).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.runtime.launch import wide


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467), in weight's dtype; x
    [..., h], weight [h].
    """
    return _normalize(x, weight, eps)[0]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Return (x - mean(x)) / sqrt(var(x) + eps) * weight + bias over the last dimension (arXiv 1607.06450), in weight's
    dtype; x [..., h], weight and bias [h].
    """
    return _center_and_normalize(x, weight, bias, eps)[0]


def affine(x: Tensor, bias: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return (x + bias) * scale, rounded to `dtype`; x [..., h], bias and scale [h]. The scale comes after the bias, as
    the released weights are stored.
    """
    return ((x.to(wide(x.dtype)) + bias) * scale).to(dtype)


def affine_rms_norm(
    x: Tensor, bias: Tensor, scale: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the RMSNorm of `affine`, and that. Compiled, they are one kernel that adds the two gradients of the
    stream.
    """
    stream = affine(x, bias, scale, dtype)
    return rms_norm(stream, weight, eps), stream


def affine_layer_norm(
    x: Tensor, bias: Tensor, scale: Tensor, weight: Tensor, norm_bias: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return the LayerNorm, with `weight` and `norm_bias`, of `affine`, and that."""
    stream = affine(x, bias, scale, dtype)
    return layer_norm(stream, weight, norm_bias, eps), stream


def scale_residual(
    output: Tensor,
    residual: Tensor,
    output_bias: Tensor,
    output_scale: Tensor,
    residual_bias: Tensor,
    residual_scale: Tensor,
) -> Tensor:
    """Return (output + output_bias) * output_scale + (residual + residual_bias) * residual_scale, in residual's dtype.

    Multiplied out: the biases become one vector, and each operand is read once.
    """
    compute = wide(residual.dtype)
    b_o, s_o, b_x, s_x = (v.to(compute) for v in (output_bias, output_scale, residual_bias, residual_scale))
    shift = b_o * s_o + b_x * s_x
    return torch.addcmul(torch.addcmul(shift, output.to(compute), s_o), residual.to(compute), s_x).to(residual.dtype)


def merge_norm(
    output: Tensor,
    residual: Tensor,
    output_bias: Tensor | None,
    output_scale: Tensor | None,
    residual_bias: Tensor | None,
    residual_scale: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y in weight's dtype, new_residual in residual's, mean and rstd, 1 / sqrt(variance + eps).

    new_residual is `scale_residual` of its arguments, or output + residual without the four vectors. With a bias y is
    the LayerNorm of new_residual, else its RMSNorm, whose mean square is taken for the variance and whose mean is an
    empty tensor.
    """
    output, residual = output.contiguous(), residual.contiguous()
    if output_scale is None:
        compute = wide(residual.dtype)
        new_residual = (output.to(compute) + residual.to(compute)).to(residual.dtype)
    else:
        new_residual = scale_residual(output, residual, output_bias, output_scale, residual_bias, residual_scale)
    if bias is None:
        y, rstd = _normalize(new_residual, weight, eps)
        return y, new_residual, rstd.new_empty(0), rstd
    y, mean, rstd = _center_and_normalize(new_residual, weight, bias, eps)
    return y, new_residual, mean, rstd


def merge_norm_backward(
    dy: Tensor,
    d_new_residual: Tensor | None,
    output: Tensor | None,
    residual: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    output_bias: Tensor | None,
    output_scale: Tensor | None,
    residual_bias: Tensor | None,
    residual_scale: Tensor | None,
    weight: Tensor,
    output_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of output, residual, the four vectors, weight and bias; empty tensors for what the forward
    did not get. d_new_residual None means zeros; mean is LayerNorm's, else None.

    With the vectors new_residual is merged again from output and residual, which the gradients of the scales need
    anyway: reading it would cost another 4 bytes an element, and getting sum(g * residual) from it a division by
    residual_scale. Without them output is None and residual is new_residual; output and residual have the same
    gradient, and where their dtypes agree it is returned once: that of output is then an empty tensor.
    """
    vectors = (output_bias, output_scale, residual_bias, residual_scale)
    new_residual = residual
    if output_scale is not None:
        output, residual = output.contiguous(), residual.contiguous()
        new_residual = scale_residual(output, residual, *vectors)
    total, d_weight, d_bias = _through_norm(dy, d_new_residual, new_residual, mean, rstd, weight)
    return *_merge_gradients(total, output, residual, *vectors, weight, output_dtype), d_weight, d_bias


def _merge_gradients(
    total: Tensor,
    output: Tensor | None,
    residual: Tensor,
    output_bias: Tensor | None,
    output_scale: Tensor | None,
    residual_bias: Tensor | None,
    residual_scale: Tensor | None,
    weight: Tensor,
    output_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of output, residual and the four vectors from `total`, that of new_residual in the compute
    dtype; without the vectors as in merge_norm_backward.
    """
    if output_scale is None:
        same = output_dtype == residual.dtype
        d_output = total.new_empty(0, dtype=output_dtype) if same else total.to(output_dtype)
        return d_output, total.to(residual.dtype), *(weight.new_empty(0) for _ in range(4))
    compute = total.dtype
    b_o, s_o, b_x, s_x = (v.to(compute) for v in (output_bias, output_scale, residual_bias, residual_scale))
    d_shift = total.sum_to_size(output_bias.shape)
    vectors = (
        d_shift * s_o,
        (total * output.to(compute)).sum_to_size(output_bias.shape) + d_shift * b_o,
        d_shift * s_x,
        (total * residual.to(compute)).sum_to_size(output_bias.shape) + d_shift * b_x,
    )
    d_output, d_residual = (total * s_o).to(output_dtype), (total * s_x).to(residual.dtype)
    return d_output, d_residual, *(v.to(output_bias.dtype) for v in vectors)


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


def _through_norm(dy, d_new_residual, new_residual, mean, rstd, weight) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradient of new_residual through both outputs, in the compute dtype, and those of weight and bias, an
    empty tensor without a mean.
    """
    compute = rstd.dtype
    value, dy = new_residual.contiguous().to(compute), dy.contiguous().to(compute)
    normalized = (value if mean is None else value - mean) * rstd
    d_normalized = dy * weight.to(compute)
    d_weight = (dy * normalized).sum_to_size(weight.shape).to(weight.dtype)
    if mean is None:
        d_rstd = (d_normalized * value).sum(-1, keepdim=True)
        d_mean_square = -0.5 * rstd.pow(3) * d_rstd
        total, d_bias = d_normalized * rstd, weight.new_empty(0)
    else:
        projection = (d_normalized * normalized).mean(-1, keepdim=True)
        total = (d_normalized - d_normalized.mean(-1, keepdim=True) - normalized * projection) * rstd
        d_bias = dy.sum_to_size(weight.shape).to(weight.dtype)
    if d_new_residual is not None:
        total = d_new_residual.contiguous().to(compute) + total
    if mean is None:
        total = total + d_mean_square / value.shape[-1] * (2.0 * value)
    return total, d_weight, d_bias
