# SPDX-License-Identifier: Apache-2.0
"""Residual merge + RMSNorm in one pass over the stream, as torch operators with gradients for everything.

The gradient of a merge reaches its inputs through both results: through y by the norm, and through new_residual, which the
next merge reads. Conventions that all back ends share - where the statistics are taken, what is rounded when - are in
hip_ops/reference/rms_norm.py. Saved for the backward: of the plain form new_residual, of ZAYA's output and residual, and rstd.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.direct import direct_operator
from hip_ops.operator import Operator
from hip_ops.reference import rms_norm as reference

DTYPES = (torch.bfloat16, torch.float32)


def _agree(x: Tensor, residual: Tensor, *vectors: Tensor) -> bool:
    """Whether these are all right, in bf16 and fp32. Else `_check` finds what is wrong, if anything is."""
    shape, device, dtype = x.shape, x.device, vectors[0].dtype
    if not shape or shape[-1] == 0:
        return False
    hidden = shape[-1:]
    for vector in vectors:
        if vector.shape != hidden or vector.dtype != dtype or vector.device != device:
            return False
    return (
        residual.shape == shape
        and residual.device == device
        and x.dtype in DTYPES
        and residual.dtype in DTYPES
        and dtype in DTYPES
    )


def _check(operator: str, streams: dict[str, Tensor], vectors: dict[str, Tensor]) -> None:
    """Raises ValueError unless streams agree in shape [..., h], vectors are [h] of one dtype, and all are on one device."""
    (first_name, first), *_ = streams.items()
    (last_name, weight) = list(vectors.items())[-1]
    if first.dim() == 0 or first.shape[-1] == 0:
        raise ValueError(
            f"hip_ops.{operator}: {first_name} has shape {tuple(first.shape)}; it must be [..., h] with h > 0"
        )
    for name, tensor in streams.items():
        if tensor.shape != first.shape:
            raise ValueError(
                f"hip_ops.{operator}: {name} has shape {tuple(tensor.shape)}; it must be that of {first_name}, {tuple(first.shape)}"
            )
    for name, tensor in vectors.items():
        if tensor.shape != first.shape[-1:]:
            raise ValueError(
                f"hip_ops.{operator}: {name} has shape {tuple(tensor.shape)}; it must be {tuple(first.shape[-1:])}, the last dimension of {first_name}"
            )
        if tensor.dtype != weight.dtype:
            raise ValueError(
                f"hip_ops.{operator}: {name} is {tensor.dtype}; it must be {weight.dtype} like {last_name}"
            )
    everything = {**streams, **vectors}
    all_fp64 = all(tensor.dtype == torch.float64 for tensor in everything.values())
    for name, tensor in everything.items():
        if tensor.device != first.device:
            raise ValueError(
                f"hip_ops.{operator}: {name} is on {tensor.device}; it must be on {first.device} like {first_name}"
            )
        if tensor.dtype not in DTYPES and not all_fp64:
            raise ValueError(
                f"hip_ops.{operator}: {name} is {tensor.dtype}; it must be torch.bfloat16 or torch.float32 (or all tensors torch.float64)"
            )


def _example(scaled: bool, backward: bool):
    """ZAYA1's hidden size and dtypes, hence the kernels that it trains with."""

    def make(device: torch.device) -> tuple:
        shape, hidden = (3, 7, 2048), 2048
        x = torch.randn(shape, device=device).bfloat16()
        residual = torch.randn(shape, device=device)
        vectors = [
            (torch.randn(hidden, device=device) * 0.3 + (1.0 if scale else 0.0)).bfloat16() for scale in (0, 1, 0, 1, 1)
        ]
        if not backward:
            return (x, residual, *vectors, 1e-5) if scaled else (x, residual, vectors[-1], 1e-5)
        dy, d_new_residual = torch.randn(shape, device=device).bfloat16(), torch.randn(shape, device=device)
        rstd = torch.rand((*shape[:-1], 1), device=device) + 0.5
        if scaled:
            return dy, d_new_residual, x, residual, rstd, *vectors
        return dy, d_new_residual, residual, rstd, vectors[-1], torch.bfloat16

    return make


def _operator(name: str) -> Operator:
    scaled, backward = name.startswith("scaled"), name.endswith("backward")
    return Operator(
        name,
        torch=getattr(reference, name),
        triton=f"hip_ops.triton_kernels.rms_norm:{name}",
        hip=f"hip_ops.hip_kernels.rms_norm:{name}",
        example=_example(scaled, backward),
    )


_add, _add_backward = _operator("add_rms_norm"), _operator("add_rms_norm_backward")
_scaled, _scaled_backward = _operator("scaled_residual_rms_norm"), _operator("scaled_residual_rms_norm_backward")


def _run(operator: Operator, weight: Tensor, *arguments) -> tuple[Tensor, ...]:
    """fp64 is for checking and runs in plain torch. The results are contiguous, whatever torch made of strided input."""
    if (
        weight.device.type == "cpu"
    ):  # torch's own loops sum strided rows in another order: the last bit would depend on strides
        arguments = [a.contiguous() if isinstance(a, Tensor) else a for a in arguments]
    results = (operator.reference if weight.dtype == torch.float64 else operator)(*arguments)
    return tuple([result.contiguous() for result in results])


def _forward_fakes(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape, dtype=weight.dtype),
        x.new_empty(x.shape, dtype=residual.dtype),
        x.new_empty((*x.shape[:-1], 1), dtype=reference.compute_dtype(residual)),
    )


@direct_operator("hip_ops::add_rms_norm", mutates_args=())
def _add_op(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return _run(_add, weight, x, residual, weight, eps)


@_add_op.register_fake
def _(x, residual, weight, eps):
    return _forward_fakes(x, residual, weight)


@direct_operator("hip_ops::add_rms_norm_backward", mutates_args=())
def _add_backward_op(
    dy: Tensor, d_new_residual: Tensor | None, new_residual: Tensor, rstd: Tensor, weight: Tensor, x_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return _run(_add_backward, weight, dy, d_new_residual, new_residual, rstd, weight, x_dtype)


@_add_backward_op.register_fake
def _(dy, d_new_residual, new_residual, rstd, weight, x_dtype):
    shape = new_residual.shape if x_dtype != new_residual.dtype else (0,)
    return (
        dy.new_empty(dy.shape, dtype=new_residual.dtype),
        dy.new_empty(shape, dtype=x_dtype),
        weight.new_empty(weight.shape),
    )


@direct_operator("hip_ops::scaled_residual_rms_norm", mutates_args=())
def _scaled_op(
    output: Tensor,
    residual: Tensor,
    output_bias: Tensor,
    output_scale: Tensor,
    residual_bias: Tensor,
    residual_scale: Tensor,
    weight: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _run(
        _scaled, weight, output, residual, output_bias, output_scale, residual_bias, residual_scale, weight, eps
    )


@_scaled_op.register_fake
def _(output, residual, output_bias, output_scale, residual_bias, residual_scale, weight, eps):
    return _forward_fakes(output, residual, weight)


@direct_operator("hip_ops::scaled_residual_rms_norm_backward", mutates_args=())
def _scaled_backward_op(
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
    vectors = (output_bias, output_scale, residual_bias, residual_scale)
    return _run(_scaled_backward, weight, dy, d_new_residual, output, residual, rstd, *vectors, weight)


@_scaled_backward_op.register_fake
def _(dy, d_new_residual, output, residual, rstd, output_bias, output_scale, residual_bias, residual_scale, weight):
    streams = (dy.new_empty(dy.shape, dtype=t.dtype) for t in (output, residual))
    return *streams, *(weight.new_empty(weight.shape) for _ in range(5))


def _save_add(ctx, inputs, output) -> None:
    x, _, weight, _ = inputs
    _, new_residual, rstd = output
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(new_residual, rstd, weight)
    ctx.x_dtype = x.dtype


def _add_gradients(ctx, dy, d_new_residual, _):
    new_residual, rstd, weight = ctx.saved_tensors
    dy = _given(dy, new_residual, weight)
    d_residual, d_x, d_weight = _add_backward_op(dy, d_new_residual, new_residual, rstd, weight, ctx.x_dtype)
    return d_x if ctx.x_dtype != d_residual.dtype else d_residual, d_residual, d_weight, None


def _save_scaled(ctx, inputs, output) -> None:
    x, residual, *vectors, _ = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, residual, output[2], *vectors)


def _scaled_gradients(ctx, dy, d_new_residual, _):
    output, residual, rstd, *vectors = ctx.saved_tensors
    dy = _given(dy, output, vectors[-1])
    return *_scaled_backward_op(dy, d_new_residual, output, residual, rstd, *vectors), None


def _given(dy: Tensor | None, like: Tensor, weight: Tensor) -> Tensor:
    """The kernels always read dy: zeros where y was not used. (Where new_residual was not, they read nothing.)"""
    return torch.zeros(like.shape, dtype=weight.dtype, device=like.device) if dy is None else dy


_add_op.register_autograd(_add_gradients, setup_context=_save_add)
_scaled_op.register_autograd(_scaled_gradients, setup_context=_save_scaled)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """new_residual = x + residual; y = new_residual / sqrt(mean(new_residual^2) + eps) * weight (arXiv 1910.07467).

    Args: x and residual [..., h], bf16 or fp32 each, with any strides (a copy is made where rows are not contiguous); weight [h].
    Returns (y in weight's dtype, new_residual in residual's), contiguous. Statistics are fp32, of new_residual as stored.
    All-fp64 tensors are computed by the torch reference. Raises ValueError on wrong shapes, dtypes or devices.
    """
    if not _agree(x, residual, weight):
        _check("add_rms_norm", {"x": x, "residual": residual}, {"weight": weight})
    y, new_residual, _ = _add_op(x, residual, weight, eps)
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

    Args: output [..., h] of the layer and residual [..., h], the stream, bf16 or fp32 each; the five vectors [h] of one dtype.
    Returns (y in weight's dtype, new_residual in residual's), contiguous; else as add_rms_norm.
    """
    vectors = (output_bias, output_scale, residual_bias, residual_scale, weight)
    if not _agree(output, residual, *vectors):
        names = ("output_bias", "output_scale", "residual_bias", "residual_scale", "weight")
        _check(
            "scaled_residual_rms_norm", {"output": output, "residual": residual}, dict(zip(names, vectors, strict=True))
        )
    y, new_residual, _ = _scaled_op(output, residual, *vectors, eps)
    return y, new_residual
