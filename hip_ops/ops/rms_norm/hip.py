# SPDX-License-Identifier: Apache-2.0
"""Host side of hip_ops/ops/rms_norm/rms_norm*.hip: allocates the results and calls the launchers. Same functions as
reference.py.

The sources choose the kernel: one that keeps a row in registers where hidden size and dtypes are in the table of
rms_norm.h and all rows are 16-byte aligned, else the generic one. Launchers and kernels, whose names macros join (H is
the hidden size; x is the layer's output, residual the stream):

    ho_rms_norm_forward       rms_norm.hip           ho_scaled_residual_rms_norm_H or ho_rms_norm_any
    ho_rms_norm_backward      rms_norm_backward.hip  ho_scaled_residual_rms_norm_backward_H or ho_rms_norm_backward_any
    ho_rms_norm_backward_sum  rms_norm_sum.hip       ho_rms_norm_sum_vectors

The plain form's kernels begin with ho_add_ and LayerNorm's have layer_norm in their names.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from hip_ops.ops.rms_norm import backward_results, forward_results
from hip_ops.runtime.launch import as_rows, contiguous, multiprocessors, starts_aligned
from hip_ops.runtime.launchers import call, library, target_of

# Bits of the launchers' `types`, as in rms_norm.h.
BF16_X, BF16_RESIDUAL, BF16_WEIGHT, ALIGNED = 1, 2, 4, 8


def _types(x_dtype: torch.dtype, residual: Tensor, weight: Tensor, tensors: Iterable[Tensor | None]) -> int:
    """Return the dtype bits, and ALIGNED if each row of each tensor starts at a multiple of 16 bytes."""
    bits = sum(
        bit
        for bit, dtype in ((BF16_X, x_dtype), (BF16_RESIDUAL, residual.dtype), (BF16_WEIGHT, weight.dtype))
        if dtype == torch.bfloat16
    )
    return bits | (ALIGNED if all(t is None or starts_aligned(t) for t in tensors) else 0)


def merge_norm(
    output: Tensor, residual: Tensor, output_bias: Tensor | None, output_scale: Tensor | None,
    residual_bias: Tensor | None, residual_scale: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float,
) -> tuple[Tensor, ...]:
    """As reference.merge_norm."""
    device, hidden = output.device, output.shape[-1]
    y, new_residual, mean, rstd = forward_results(output, residual, weight, bias)
    if output.numel():
        output, residual = as_rows(output), as_rows(residual)
        vectors = contiguous(output_bias, output_scale, residual_bias, residual_scale, weight, bias)
        accessed = (output, residual, *vectors, y.view(-1, hidden), new_residual.view(-1, hidden))
        call(
            "ho_rms_norm_forward", output, residual, *vectors, y, new_residual, None if bias is None else mean, rstd,
            len(output), hidden, output.stride(0), residual.stride(0), _types(output.dtype, residual, weight, accessed),
            multiprocessors(device), eps, device=device,
        )
    return y, new_residual, mean, rstd


def merge_norm_backward(
    dy: Tensor, d_new_residual: Tensor | None, output: Tensor | None, residual: Tensor, mean: Tensor | None,
    rstd: Tensor, output_bias: Tensor | None, output_scale: Tensor | None, residual_bias: Tensor | None,
    residual_scale: Tensor | None, weight: Tensor, output_dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """As reference.merge_norm_backward."""
    device, hidden, scaled, centered = dy.device, dy.shape[-1], output_scale is not None, mean is not None
    vectors = contiguous(output_bias, output_scale, residual_bias, residual_scale)
    d_output, d_residual, *gradients = results = backward_results(dy, residual, mean, vectors, weight, output_dtype)
    if not dy.numel():
        return results
    dy, residual, (mean, rstd, weight) = as_rows(dy), as_rows(residual), contiguous(mean, rstd, weight)
    output, d_new_residual = (None if t is None else as_rows(t) for t in (output, d_new_residual))
    accessed = (dy, d_new_residual, output, residual, weight, *vectors, d_residual.view(-1, hidden))
    types = _types(output_dtype, residual, weight, accessed)
    count_blocks = library(target_of(device)).ho_rms_norm_backward_blocks
    blocks = count_blocks(len(dy), hidden, types, scaled, centered, multiprocessors(device))
    partial = torch.empty((blocks, (4 if scaled else 1) + centered, hidden), dtype=torch.float32, device=device)
    call(
        "ho_rms_norm_backward", dy, d_new_residual, output, residual, mean, rstd, *vectors, weight, d_output,
        d_residual, partial, len(dy), hidden, dy.stride(0), 0 if d_new_residual is None else d_new_residual.stride(0),
        0 if output is None else output.stride(0), residual.stride(0), types, blocks, device=device,
    )
    sums = (gradient if gradient.numel() else None for gradient in gradients)
    call("ho_rms_norm_backward_sum", partial, *vectors, *sums, blocks, hidden, types, device=device)
    return results
