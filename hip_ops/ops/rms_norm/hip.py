# SPDX-License-Identifier: Apache-2.0
"""Host side of hip_ops/ops/rms_norm/rms_norm*.hip: allocates the results and calls the launchers. Same functions as
hip_ops.ops.rms_norm.reference.

The sources choose the kernel: one that keeps a row in registers where hidden size and dtypes are in the table of
rms_norm.h and all rows are 16-byte aligned, else the generic one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.ops.rms_norm.host import empty_results, functions, layer_norm_functions
from hip_ops.runtime.library import call, library, target_of
from hip_ops.runtime.on_device import multiprocessors
from hip_ops.runtime.row_views import as_rows, starts_aligned

# Bits of the launchers' `types`, as in rms_norm.h.
BF16_X, BF16_RESIDUAL, BF16_WEIGHT, ALIGNED = 1, 2, 4, 8


def _types(x_dtype: torch.dtype, residual: Tensor, weight: Tensor, tensors: list[Tensor]) -> int:
    """Returns the dtype bits, and ALIGNED if each row of each tensor starts at a multiple of 16 bytes."""
    bits = sum(
        bit
        for bit, dtype in ((BF16_X, x_dtype), (BF16_RESIDUAL, residual.dtype), (BF16_WEIGHT, weight.dtype))
        if dtype == torch.bfloat16
    )
    return bits | (ALIGNED if all(map(starts_aligned, tensors)) else 0)


def _forward(
    x: Tensor, residual: Tensor, vectors: tuple[Tensor, ...], weight: Tensor, eps: float, bias: Tensor | None = None
) -> tuple[Tensor, ...]:
    device, hidden = x.device, x.shape[-1]
    y, new_residual, *statistics = empty_results(x, residual, weight, bias is not None)
    if x.numel():
        x, residual, weight = as_rows(x), as_rows(residual), weight.contiguous()
        vectors, bias = tuple(v.contiguous() for v in vectors), None if bias is None else bias.contiguous()
        biases = [] if bias is None else [bias]
        types = _types(
            x.dtype,
            residual,
            weight,
            [x, residual, weight, *vectors, *biases, y.view(-1, hidden), new_residual.view(-1, hidden)],
        )
        mean = None if bias is None else statistics[0]
        call(
            "ho_rms_norm_forward", x, residual, *(vectors or (None,) * 4), weight, bias, y, new_residual, mean,
            statistics[-1], len(x), hidden, x.stride(0), residual.stride(0), types, multiprocessors(device), eps,
            device=device,
        )
    return y, new_residual, *statistics


def _backward(
    dy: Tensor, d_new_residual: Tensor | None, x: Tensor | None, residual: Tensor, rstd: Tensor,
    vectors: tuple[Tensor, ...], weight: Tensor, x_dtype: torch.dtype, mean: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Returns d_x, d_residual and the gradients of the vectors, weight and, with a mean, bias. Without vectors, x is
    None and residual is new_residual.
    """
    device, hidden, scaled = dy.device, dy.shape[-1], bool(vectors)
    d_residual = torch.empty(residual.shape, dtype=residual.dtype, device=device)
    d_x = torch.empty(residual.shape if scaled or x_dtype != residual.dtype else 0, dtype=x_dtype, device=device)
    like = (*vectors, weight) if mean is None else (*vectors, weight, weight)
    gradients = tuple(torch.zeros(v.shape, dtype=v.dtype, device=device) for v in like)
    if not dy.numel():
        return d_x, d_residual, *gradients
    dy, residual, rstd, weight = as_rows(dy), as_rows(residual), rstd.contiguous(), weight.contiguous()
    vectors, mean = tuple(v.contiguous() for v in vectors), None if mean is None else mean.contiguous()
    x = as_rows(x) if scaled else None
    upstream = None if d_new_residual is None else as_rows(d_new_residual)
    given = [t for t in (dy, upstream, x, residual, weight, *vectors) if t is not None]
    types = _types(x_dtype, residual, weight, [*given, d_residual.view(-1, hidden)])
    count = library(target_of(device)).ho_rms_norm_backward_blocks
    blocks = count(len(dy), hidden, types, scaled, mean is not None, multiprocessors(device))
    sums = (4 if scaled else 1) + (mean is not None)
    partial = torch.empty((blocks, sums, hidden), dtype=torch.float32, device=device)
    pointers = vectors or (None,) * 4
    call(
        "ho_rms_norm_backward", dy, upstream, x, residual, mean, rstd, *pointers, weight, d_x, d_residual, partial,
        len(dy), hidden, dy.stride(0), 0 if upstream is None else upstream.stride(0), 0 if x is None else x.stride(0),
        residual.stride(0), types, blocks, device=device,
    )
    out = (*(() if scaled else (None,) * 4), *gradients, *((None,) if mean is None else ()))
    call("ho_rms_norm_backward_sum", partial, *pointers, *out, blocks, hidden, types, device=device)
    return d_x, d_residual, *gradients


add_rms_norm, add_rms_norm_backward, scaled_residual_rms_norm, scaled_residual_rms_norm_backward = functions(
    _forward, _backward
)
add_layer_norm, add_layer_norm_backward, scaled_residual_layer_norm, scaled_residual_layer_norm_backward = (
    layer_norm_functions(_forward, _backward)
)
