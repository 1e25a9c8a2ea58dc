# SPDX-License-Identifier: Apache-2.0
"""Residual merge + RMSNorm or LayerNorm in one pass over the stream: torch operators with gradients of all arguments.

The gradient of a merge reaches its inputs through both results: through y by the norm, and through new_residual, which
the next merge reads. reference.py defines the statistics and the roundings. Saved for the backward pass: rstd, and
LayerNorm's mean; new_residual in the plain form, output and residual in ZAYA's. Single norms and merges have no
kernels: torch.compile fuses their formulas on an accelerator.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hip_ops.ops.rms_norm import aiter, reference
from hip_ops.runtime.aiter import available
from hip_ops.runtime.compiled import formula
from hip_ops.runtime.on_device import multiprocessors
from hip_ops.runtime.operator import Operator

rms_norm = formula(reference.rms_norm)
scale_residual = formula(reference.scale_residual)
affine = formula(reference.affine)
affine_rms_norm = formula(reference.affine_rms_norm)
layer_norm = formula(reference.layer_norm)
affine_layer_norm = formula(reference.affine_layer_norm)

# A program keeps a row in its registers.
FITS = {"triton": lambda rows, *_: rows.shape[-1] <= 32768}
AVAILABLE = {"aiter": functools.partial(available, first=aiter.FIRST)}
NO_LAYER_NORM = ("aiter",)


def _fits(stream: int) -> dict:
    """Makes `fits`. stream: the place of the stream among the arguments."""
    return FITS | {"aiter": lambda *arguments: aiter.fits(arguments[stream])}


VECTORS = """
    output_bias       [h]         =weight
    output_scale      [h]         =weight
    residual_bias     [h]         =weight
    residual_scale    [h]         =weight
    weight            [h]         bf16|fp32
"""
ADDED = """
    x                 [..., h>0]  bf16|fp32
    residual          [..., h]    bf16|fp32
    weight            [h]         bf16|fp32
"""
MERGED = """
    output            [..., h>0]  bf16|fp32
    residual          [..., h]    bf16|fp32
"""
BIAS = """
    bias              [h]         =weight
"""


def _example(
    scaled: bool, backward: bool, last: bool = False, centered: bool = False, stream: torch.dtype = torch.float32
):
    """Makes inputs of ZAYA1's hidden size and dtypes, which run the kernels of its training: an fp32 stream, and more
    rows than blocks, of which there are at most eight a multiprocessor (rms_norm.h). As in training the rows are a
    multiple of 16, for which Triton compiles another kernel. last: new_residual has no gradient, as in a model's last
    norm. centered: of LayerNorm. stream: dtype of residual.
    """

    def make(device: torch.device) -> tuple:
        hidden = 2048
        shape = (2, 8 * (multiprocessors(device) // 2 + 1), hidden)
        x = torch.randn(shape, device=device).bfloat16()
        residual = torch.randn(shape, device=device).to(stream)
        vectors = [
            (torch.randn(hidden, device=device) * 0.3 + (1.0 if scale else 0.0)).bfloat16() for scale in (0, 1, 0, 1, 1)
        ]
        bias = [torch.randn(hidden, device=device).bfloat16()] if centered else []
        if not backward:
            return (x, residual, *(vectors if scaled else vectors[-1:]), *bias, 1e-5)
        dy, d_new_residual = torch.randn(shape, device=device).bfloat16(), torch.randn(shape, device=device).to(stream)
        d_new_residual = None if last else d_new_residual
        statistics = [torch.rand((*shape[:-1], 1), device=device) + shift for shift in ([0.0] * centered + [0.5])]
        if scaled:
            return dy, d_new_residual, x, residual, *statistics, *vectors
        return dy, d_new_residual, residual, *statistics, vectors[-1], torch.bfloat16

    return make


def _of_the_last_norm(scaled: bool, centered: bool = False) -> dict:
    """Makes `more_examples` of a backward operator, for the versions whose kernels read a pointer that may be null."""
    last = _example(scaled, backward=True, last=True, centered=centered)
    of_bf16 = () if scaled else _of_bf16(backward=True, centered=centered)["hip"]
    return {"hip": (last, *of_bf16), "triton": (last,)}


def _of_bf16(backward: bool, centered: bool = False) -> dict:
    """Makes `more_examples` of the plain form, whose fast HIP kernels are for a bf16 stream."""
    return {"hip": (_example(False, backward, centered=centered, stream=torch.bfloat16),)}


_add = Operator(
    reference.add_rms_norm,
    takes=ADDED,
    example=_example(scaled=False, backward=False),
    more_examples=_of_bf16(backward=False),
    fits=_fits(1),
    available=AVAILABLE,
)
_scaled = Operator(
    reference.scaled_residual_rms_norm,
    takes=MERGED + VECTORS,
    example=_example(scaled=True, backward=False),
    fits=_fits(1),
    available=AVAILABLE,
)


_add_backward = Operator(
    reference.add_rms_norm_backward,
    example=_example(scaled=False, backward=True),
    more_examples=_of_the_last_norm(scaled=False),
    fits=_fits(2),
    available=AVAILABLE,
)
_scaled_backward = Operator(
    reference.scaled_residual_rms_norm_backward,
    example=_example(scaled=True, backward=True),
    more_examples=_of_the_last_norm(scaled=True),
    fits=_fits(3),
    available=AVAILABLE,
)
_add_layer = Operator(
    reference.add_layer_norm,
    takes=ADDED + BIAS,
    example=_example(scaled=False, backward=False, centered=True),
    more_examples=_of_bf16(backward=False, centered=True),
    fits=FITS,
    without=NO_LAYER_NORM,
)
_scaled_layer = Operator(
    reference.scaled_residual_layer_norm,
    takes=MERGED + VECTORS + BIAS,
    example=_example(scaled=True, backward=False, centered=True),
    fits=FITS,
    without=NO_LAYER_NORM,
)
_add_layer_backward = Operator(
    reference.add_layer_norm_backward,
    example=_example(scaled=False, backward=True, centered=True),
    more_examples=_of_the_last_norm(scaled=False, centered=True),
    fits=FITS,
    without=NO_LAYER_NORM,
)
_scaled_layer_backward = Operator(
    reference.scaled_residual_layer_norm_backward,
    example=_example(scaled=True, backward=True, centered=True),
    more_examples=_of_the_last_norm(scaled=True, centered=True),
    fits=FITS,
    without=NO_LAYER_NORM,
)


def _save_add(ctx, inputs, output) -> None:
    x, _, weight, *_ = inputs
    _, new_residual, *statistics = output
    ctx.mark_non_differentiable(*statistics)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(new_residual, *statistics, weight)
    ctx.x_dtype = x.dtype


def _save_scaled(ctx, inputs, output) -> None:
    x, residual, *vectors, _ = inputs
    statistics = output[2:]
    ctx.mark_non_differentiable(*statistics)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, residual, *statistics, *vectors[:5])


def _add_gradients(backward: Operator):
    def gradients(ctx, dy, d_new_residual, *_):
        new_residual, *rest = ctx.saved_tensors
        dy = _given(dy, new_residual, rest[-1])
        d_residual, d_x, *of_norm = backward(dy, d_new_residual, new_residual, *rest, ctx.x_dtype)
        return d_x if ctx.x_dtype != d_residual.dtype else d_residual, d_residual, *of_norm, None

    return gradients


def _scaled_gradients(backward: Operator):
    def gradients(ctx, dy, d_new_residual, *_):
        output, *rest = ctx.saved_tensors
        return *backward(_given(dy, output, rest[-1]), d_new_residual, output, *rest), None

    return gradients


def _given(dy: Tensor | None, like: Tensor, weight: Tensor) -> Tensor:
    """Passes zeros for dy where y was not used, because the kernels always read it. Without new_residual's gradient
    they read nothing.
    """
    return torch.zeros(like.shape, dtype=weight.dtype, device=like.device) if dy is None else dy


_add.register_autograd(_add_gradients(_add_backward), setup_context=_save_add)
_add_layer.register_autograd(_add_gradients(_add_layer_backward), setup_context=_save_add)
_scaled.register_autograd(_scaled_gradients(_scaled_backward), setup_context=_save_scaled)
_scaled_layer.register_autograd(_scaled_gradients(_scaled_layer_backward), setup_context=_save_scaled)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """new_residual = x + residual; y = new_residual / sqrt(mean(new_residual^2) + eps) * weight (arXiv 1910.07467).

    Args: x and residual [..., h], bf16 or fp32 each, with any strides (a copy is made where rows are not contiguous);
    weight [h]. Returns (y in weight's dtype, new_residual in residual's), contiguous. Statistics are fp32, of
    new_residual as stored. All-fp64 tensors are computed by the torch reference. Raises ValueError on wrong shapes,
    dtypes or devices.
    """
    y, new_residual, _ = _add(x, residual, weight, eps)
    return y, new_residual


def scaled_residual_rms_norm(
    output: Tensor,
    residual: Tensor,
    output_bias: Tensor,
    output_scale: Tensor,
    residual_bias: Tensor,
    residual_scale: Tensor,
    weight: Tensor,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """ZAYA's merge (transformers `ZayaResidualScaling`) and the RMSNorm of its result, in one pass.

    new_residual = (output + output_bias) * output_scale + (residual + residual_bias) * residual_scale, multiplied out
    y = new_residual / sqrt(mean(new_residual^2) + eps) * weight

    Args: output [..., h] of the layer and residual [..., h], the stream, bf16 or fp32 each; the five vectors [h] of one
    dtype. Returns (y in weight's dtype, new_residual in residual's), contiguous. Otherwise as add_rms_norm.
    """
    y, new_residual, _ = _scaled(
        output, residual, output_bias, output_scale, residual_bias, residual_scale, weight, eps
    )
    return y, new_residual


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """new_residual = x + residual; y = (new_residual - mean) / sqrt(var + eps) * weight + bias (arXiv 1607.06450).

    Args and results as of add_rms_norm, and bias [h] in weight's dtype.
    """
    y, new_residual, _, _ = _add_layer(x, residual, weight, bias, eps)
    return y, new_residual


def scaled_residual_layer_norm(
    output: Tensor,
    residual: Tensor,
    output_bias: Tensor,
    output_scale: Tensor,
    residual_bias: Tensor,
    residual_scale: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
) -> tuple[Tensor, Tensor]:
    """ZAYA's merge, as in scaled_residual_rms_norm, and the LayerNorm of its result, in one pass.

    y = (new_residual - mean) / sqrt(var + eps) * weight + bias; bias [h] in weight's dtype.
    """
    y, new_residual, _, _ = _scaled_layer(
        output, residual, output_bias, output_scale, residual_bias, residual_scale, weight, bias, eps
    )
    return y, new_residual
