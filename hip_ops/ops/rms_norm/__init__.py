# SPDX-License-Identifier: Apache-2.0
"""Residual merge + RMSNorm or LayerNorm in one pass over the stream: a torch operator with gradients of all arguments.

`_merge_norm` is the operator `merge_norm`, with optional vectors of the merge and an optional bias, which makes the
norm a LayerNorm. `_merge_norm_backward` is the operator `merge_norm_backward`, which autograd calls through
`_gradients`. Each is checked and chosen by itself, so that they may run different versions. The functions below call
`_merge_norm`. reference.py, hip.py and triton.py define both; `kernel_overrides.rms_norm` requests a version of both.

The gradient of a merge reaches its inputs through both results: through y by the norm, and through new_residual, which
the next merge reads. reference.py defines the statistics and the roundings. Saved for the backward pass: rstd, and
LayerNorm's mean; new_residual in the plain form, output and residual in ZAYA's.

A norm or a merge by itself (`rms_norm`, `scale_residual`) is no operator and has no kernel. On an accelerator `formula`
compiles it, without a self-check, also where hip or triton is requested (runtime/compiled.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hip_ops.ops.rms_norm import reference
from hip_ops.runtime.compiled import formula
from hip_ops.runtime.launch import multiprocessors
from hip_ops.runtime.model_sizes import model_sizes
from hip_ops.runtime.operator import Operator

rms_norm = formula(reference.rms_norm)
scale_residual = formula(reference.scale_residual)
affine = formula(reference.affine)
affine_rms_norm = formula(reference.affine_rms_norm)
layer_norm = formula(reference.layer_norm)
affine_layer_norm = formula(reference.affine_layer_norm)

TAKES = """
    output            [..., h>0]  bf16|fp32
    residual          [..., h]    bf16|fp32
    output_bias?      [h]         =weight
    output_scale?     [h]         =weight
    residual_bias?    [h]         =weight
    residual_scale?   [h]         =weight
    weight            [h]         bf16|fp32
    bias?             [h]         =weight
"""
VECTORS = ("output_bias", "output_scale", "residual_bias", "residual_scale")


def _rule(values: dict) -> tuple[str, str] | None:
    missing = [name for name in VECTORS if values[name] is None]
    return (f"{missing[0]} is None", "all four vectors of the merge, or none") if 0 < len(missing) < 4 else None


# A Triton program keeps a row in its registers.
MAX_TRITON_COLUMNS = 32768
FITS = {"triton": lambda rows, *_: rows.shape[-1] <= MAX_TRITON_COLUMNS}


def _example(
    backward: bool, scaled: bool, centered: bool = False, last: bool = False, stream: torch.dtype = torch.float32
) -> Callable[[torch.device], tuple]:
    """Make inputs of the model's hidden size and ZAYA1's dtypes, which run the kernels of its training: an fp32 stream, and more
    rows than blocks, of which there are at most eight a multiprocessor (rms_norm.h). As in training the rows are a
    multiple of 16, for which Triton compiles another kernel. centered: of LayerNorm. last: new_residual has no
    gradient, as in a model's last norm. stream: dtype of residual.
    """

    def make(device: torch.device) -> tuple:
        hidden = min(model_sizes().hidden_size, MAX_TRITON_COLUMNS)
        shape = (2, 8 * (multiprocessors(device) // 2 + 1), hidden)
        output = torch.randn(shape, device=device).bfloat16()
        residual = torch.randn(shape, device=device).to(stream)
        *vectors, weight = (
            (torch.randn(hidden, device=device) * 0.3 + (1.0 if scale else 0.0)).bfloat16() for scale in (0, 1, 0, 1, 1)
        )
        vectors = vectors if scaled else [None] * 4
        if not backward:
            bias = torch.randn(hidden, device=device).bfloat16() if centered else None
            return output, residual, *vectors, weight, bias, 1e-5
        dy, d_new_residual = torch.randn(shape, device=device).bfloat16(), torch.randn(shape, device=device).to(stream)
        mean, rstd = (torch.rand((*shape[:-1], 1), device=device) + shift for shift in (0.0, 0.5))
        kept = (output if scaled else None, residual, mean if centered else None, rstd)
        return dy, None if last else d_new_residual, *kept, *vectors, weight, torch.bfloat16

    return make


def _examples(backward: bool) -> dict[str, Any]:
    """Make `example` and `more_examples` of an operator: ZAYA's merge and the plain one, with RMSNorm and with
    LayerNorm; for the fast HIP kernels of the plain form a bf16 stream; and for kernels that read a pointer that may be
    null a last norm.
    """
    example = functools.partial(_example, backward)
    forms = ((True, False), (False, False), (True, True), (False, True))  # scaled, centered
    last = tuple(example(*form, last=True) for form in forms) if backward else ()
    of_bf16 = tuple(example(False, centered, stream=torch.bfloat16) for centered in (False, True))
    examples = tuple(example(*form) for form in forms)
    return {"example": examples, "more_examples": {"hip": (*last, *of_bf16), "triton": last}}


_merge_norm = Operator(reference.merge_norm, takes=TAKES, rule=_rule, fits=FITS, **_examples(backward=False))
_merge_norm_backward = Operator(reference.merge_norm_backward, fits=FITS, **_examples(backward=True))


def _save(ctx, inputs, output) -> None:
    """Save the arguments of `_merge_norm_backward`. In the plain form new_residual takes the place of output and
    residual.
    """
    of_layer, residual, *vectors, weight, bias, _ = inputs
    _, new_residual, mean, rstd = output
    ctx.mark_non_differentiable(mean, rstd)
    ctx.set_materialize_grads(False)
    operands = (None, new_residual) if vectors[0] is None else (of_layer, residual)
    ctx.save_for_backward(*operands, None if bias is None else mean, rstd, *vectors, weight)
    ctx.output_dtype = of_layer.dtype


def _gradients(ctx, dy, d_new_residual, *_):
    """Return the gradients of merge_norm's arguments by one call of `_merge_norm_backward`, whose results have the
    order of the arguments; those of arguments that are None are replaced by None.
    """
    output, residual, mean, rstd, *vectors, weight = ctx.saved_tensors
    if dy is None:  # y is not used. All versions read dy; they take None only for d_new_residual.
        dy = torch.zeros(residual.shape, dtype=weight.dtype, device=residual.device)
    d_output, d_residual, *d_parameters = _merge_norm_backward(
        dy, d_new_residual, output, residual, mean, rstd, *vectors, weight, ctx.output_dtype
    )
    if output is None and ctx.output_dtype == residual.dtype:
        d_output = d_residual
    parameters = (*vectors, weight, mean)  # mean in the place of bias, which is not saved: both are None or neither
    d_parameters = (None if p is None else d for d, p in zip(d_parameters, parameters, strict=True))
    return d_output, d_residual, *d_parameters, None


_merge_norm.register_autograd(_gradients, setup_context=_save)


def forward_results(output: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Allocate the results of merge_norm for a kernel."""
    y = torch.empty(output.shape, dtype=weight.dtype, device=output.device)
    new_residual = torch.empty(output.shape, dtype=residual.dtype, device=output.device)
    mean, rstd = (
        torch.empty(shape, dtype=torch.float32, device=output.device)
        for shape in ((0,) if bias is None else (*output.shape[:-1], 1), (*output.shape[:-1], 1))
    )
    return y, new_residual, mean, rstd


def backward_results(
    dy: Tensor,
    residual: Tensor,
    mean: Tensor | None,
    vectors: Sequence[Tensor | None],
    weight: Tensor,
    output_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Allocate the results of merge_norm_backward for a kernel; those of vectors are zeros where there are no rows."""
    once = vectors[0] is None and output_dtype == residual.dtype
    d_output = torch.empty(0 if once else residual.shape, dtype=output_dtype, device=dy.device)
    d_residual = torch.empty(residual.shape, dtype=residual.dtype, device=dy.device)
    allocate = torch.empty if dy.numel() else torch.zeros
    inputs = (*vectors, weight, None if mean is None else weight)
    sizes = (0 if vector is None else len(vector) for vector in inputs)
    return d_output, d_residual, *(allocate(size, dtype=weight.dtype, device=dy.device) for size in sizes)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """Add x to the stream and return the RMSNorm of the sum and the sum, in one pass (arXiv 1910.07467).

    new_residual = x + residual;  y = new_residual / sqrt(mean(new_residual^2) + eps) * weight

    Args: x and residual [..., h], bf16 or fp32 each, with any strides (a copy is made where rows are not contiguous);
    weight [h]. Return (y in weight's dtype, new_residual in residual's), contiguous. Statistics are fp32, of
    new_residual as stored. All-fp64 tensors are computed by the torch reference. Raises ValueError on wrong shapes,
    dtypes or devices.
    """
    return _merge_norm(x, residual, *[None] * 4, weight, None, eps)[:2]


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
    """Return the RMSNorm of ZAYA's merge (transformers `ZayaResidualScaling`) and the merge, in one pass.

    new_residual = (output + output_bias) * output_scale + (residual + residual_bias) * residual_scale, multiplied out
    y = new_residual / sqrt(mean(new_residual^2) + eps) * weight

    Args: output [..., h] of the layer and residual [..., h], the stream, bf16 or fp32 each; the five vectors [h] of one
    dtype. Return (y in weight's dtype, new_residual in residual's), contiguous. Otherwise as add_rms_norm.
    """
    vectors = (output_bias, output_scale, residual_bias, residual_scale)
    return _merge_norm(output, residual, *vectors, weight, None, eps)[:2]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """Add x to the stream and return the LayerNorm of the sum and the sum, in one pass (arXiv 1607.06450).

    new_residual = x + residual;  y = (new_residual - mean) / sqrt(var + eps) * weight + bias

    Args and results as of add_rms_norm, and bias [h] in weight's dtype.
    """
    return _merge_norm(x, residual, *[None] * 4, weight, bias, eps)[:2]


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
    """Return the LayerNorm of ZAYA's merge, as in scaled_residual_rms_norm, and the merge, in one pass.

    y = (new_residual - mean) / sqrt(var + eps) * weight + bias; bias [h] in weight's dtype.
    """
    vectors = (output_bias, output_scale, residual_bias, residual_scale)
    return _merge_norm(output, residual, *vectors, weight, bias, eps)[:2]
