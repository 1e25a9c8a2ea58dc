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
from hip_ops.ops.rms_norm.host import empty_results, functions
from hip_ops.runtime.aiter import Function
from hip_ops.runtime.on_device import on

FIRST = "0.1.14"
WIDEST = 16384  # fp32 columns; AITER computes wider rows in blocks
_MODULE = "aiter.ops.triton.normalization.rmsnorm"
ADD = Function(
    _MODULE, "_rmsnorm_forward_with_add", ("out", "x", "residual_in", "residual_out", "weight", "rsigma", "epsilon")
)
NORM = Function(_MODULE, "_rmsnorm_forward", ("x", "weight", "epsilon"))
BACKWARD = Function(_MODULE, "_rmsnorm_backward", ("dz", "x", "gamma", "rsigma"))


def fits(stream: Tensor) -> bool:
    """Returns whether AITER computes the norm of this stream, with offsets of 32 bits."""
    return stream.dtype == torch.float32 and 1 < stream.shape[-1] <= WIDEST and 0 < stream.numel() < 2**31


def _rows(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


def _forward(
    x: Tensor, residual: Tensor, vectors: tuple[Tensor, ...], weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    weight = weight.contiguous()
    if vectors:
        new_residual = reference.scale_residual(x.contiguous(), residual.contiguous(), *vectors)
        with on(x.device):
            y, rstd = NORM(x=_rows(new_residual), weight=weight, epsilon=eps)
        return y.view(x.shape).to(weight.dtype), new_residual, rstd.view(*x.shape[:-1], 1)
    y, new_residual, rstd = empty_results(x, residual, weight)
    with on(x.device):
        ADD(
            out=_rows(y),
            x=_rows(x),
            residual_in=_rows(residual),
            residual_out=_rows(new_residual),
            weight=weight,
            rsigma=rstd.view(-1),
            epsilon=eps,
        )
    return y, new_residual, rstd


def _backward(
    dy: Tensor,
    d_new_residual: Tensor | None,
    x: Tensor | None,
    residual: Tensor,
    rstd: Tensor,
    vectors: tuple[Tensor, ...],
    weight: Tensor,
    x_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    if vectors:
        x, residual = x.contiguous(), residual.contiguous()
    new_residual = reference.scale_residual(x, residual, *vectors) if vectors else residual
    with on(dy.device):
        through_norm, d_weight = BACKWARD(
            dz=_rows(dy), x=_rows(new_residual), gamma=weight.contiguous(), rsigma=rstd.contiguous().view(-1)
        )
    total = through_norm.view(residual.shape)
    if d_new_residual is not None:
        total = d_new_residual + total
    if vectors:
        return *reference.merge_gradients(total, x, residual, *vectors), d_weight
    d_x = total.to(x_dtype) if x_dtype != total.dtype else total.new_empty(0, dtype=x_dtype)
    return d_x, total, d_weight


add_rms_norm, add_rms_norm_backward, scaled_residual_rms_norm, scaled_residual_rms_norm_backward = functions(
    _forward, _backward
)
