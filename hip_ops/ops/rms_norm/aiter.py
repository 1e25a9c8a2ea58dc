# SPDX-License-Identifier: Apache-2.0
"""Residual merge + RMSNorm on the Triton kernels of AITER. Not run on any device by this project.

AITER's autograd function of the addition and the norm (`rmsnorm2d_fwd_with_add`) returns no gradient of the residual
and leaves the sum outside of the graph, in every release that was read. So only the functions below it are called,
which compute the sum, the norm, and the gradients through the norm; the gradients that reach the inputs past the norm
are added here. ZAYA's merge has no kernel in AITER and is computed by torch.

`fits` holds calls to what the self-check runs: rows that one program keeps whole, and an fp32 stream. With a bf16 one
the gradient through the norm is rounded before the other is added, and the statistics of an fp32 x are of the sum
before it is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.ops.rms_norm import reference
from hip_ops.ops.rms_norm.reference import empty_results
from hip_ops.runtime.aiter import Function
from hip_ops.runtime.on_device import on

FIRST_RELEASE = "0.1.14"
MAX_COLUMNS = 16384  # fp32 columns; AITER computes wider rows in blocks
_MODULE = "aiter.ops.triton.normalization.rmsnorm"
ADD = Function(
    _MODULE, "_rmsnorm_forward_with_add", ("out", "x", "residual_in", "residual_out", "weight", "rsigma", "epsilon")
)
NORM = Function(_MODULE, "_rmsnorm_forward", ("x", "weight", "epsilon"))
BACKWARD = Function(_MODULE, "_rmsnorm_backward", ("dz", "x", "gamma", "rsigma"))


def fits(stream: Tensor, layer_norm: bool) -> bool:
    """Return whether AITER computes the norm of this stream, with offsets of 32 bits."""
    return (
        not layer_norm
        and stream.dtype == torch.float32
        and 1 < stream.shape[-1] <= MAX_COLUMNS
        and 0 < stream.numel() < 2**31
    )


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


def merge_norm(
    output: Tensor,
    residual: Tensor,
    output_bias: Tensor | None,
    output_scale: Tensor | None,
    residual_bias: Tensor | None,
    residual_scale: Tensor | None,
    weight: Tensor,
    bias: None,
    eps: float,
) -> tuple[Tensor, ...]:
    """As reference.merge_norm, of RMSNorm."""
    weight = weight.contiguous()
    if output_scale is not None:
        vectors = (output_bias, output_scale, residual_bias, residual_scale)
        new_residual = reference.scale_residual(output.contiguous(), residual.contiguous(), *vectors)
        with on(output.device):
            y, rstd = NORM(x=_rows(new_residual), weight=weight, epsilon=eps)
        return y.view(output.shape).to(weight.dtype), new_residual, rstd.new_empty(0), rstd.view(*output.shape[:-1], 1)
    y, new_residual, mean, rstd = empty_results(output, residual, weight, bias)
    with on(output.device):
        ADD(
            out=_rows(y),
            x=_rows(output),
            residual_in=_rows(residual),
            residual_out=_rows(new_residual),
            weight=weight,
            rsigma=rstd.view(-1),
            epsilon=eps,
        )
    return y, new_residual, mean, rstd


def merge_norm_backward(
    dy: Tensor,
    d_new_residual: Tensor | None,
    output: Tensor | None,
    residual: Tensor,
    mean: None,
    rstd: Tensor,
    output_bias: Tensor | None,
    output_scale: Tensor | None,
    residual_bias: Tensor | None,
    residual_scale: Tensor | None,
    weight: Tensor,
    output_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """As reference.merge_norm_backward, of RMSNorm."""
    vectors, new_residual = (output_bias, output_scale, residual_bias, residual_scale), residual
    if output_scale is not None:
        output, residual = output.contiguous(), residual.contiguous()
        new_residual = reference.scale_residual(output, residual, *vectors)
    with on(dy.device):
        through_norm, d_weight = BACKWARD(
            dz=_rows(dy), x=_rows(new_residual), gamma=weight.contiguous(), rsigma=rstd.contiguous().view(-1)
        )
    total = through_norm.view(residual.shape)
    if d_new_residual is not None:
        total = d_new_residual + total
    return (
        *reference.merge_gradients(total, output, residual, *vectors, weight, output_dtype),
        d_weight,
        weight.new_empty(0),
    )
