# SPDX-License-Identifier: Apache-2.0
"""Host side of cca_prologue*.hip: allocates the results and calls the launchers. Same functions as reference.py.

The kernels take heads of 128 channels in bf16, rotations of a multiple of 8 channels, and delayed channels in multiples
of four (`fits`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.ops.cca_prologue import HEAD_DIM
from hip_ops.ops.cca_prologue.reference import chunk_count
from hip_ops.runtime.launch import contiguous, empty_results, multiprocessors, starts_aligned
from hip_ops.runtime.launchers import call, library, target_of

ZERO_RUNS = 512  # blocks that recompute keys whose temperature is zero


def _aligned(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor, or a copy where rows are not contiguous or do not start at multiples of 16 bytes."""
    if tensor is None or tensor.stride(-1) == 1 and starts_aligned(tensor):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _rope(rope: Tensor | None) -> tuple[Tensor | None, int, int, int]:
    """Return the table, its strides, and the number of rotating channels; without a table all channels rotate by 0."""
    rope = _aligned(rope)
    return (
        (None, 0, 0, HEAD_DIM)
        if rope is None
        else (rope, rope.stride(0), rope.stride(1) if rope.shape[1] > 1 else 0, rope.shape[-1])
    )


def cca_prologue(
    projected: Tensor, depthwise_weight: Tensor, depthwise_bias: Tensor, grouped_weight: Tensor, grouped_bias: Tensor,
    temperature: Tensor, rope: Tensor | None, halo: Tensor | None, value_halo: Tensor | None, starts: Tensor | None,
    query_groups: int, delayed_channels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As reference.cca_prologue."""
    parameters = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, temperature)
    device, (s, b) = projected.device, projected.shape[:2]
    heads = len(grouped_bias) // HEAD_DIM - query_groups
    query, key, value = (
        torch.empty((s, b, count, HEAD_DIM), dtype=projected.dtype, device=device)
        for count in (heads, query_groups, query_groups)
    )
    inverse_norm = torch.empty((heads + query_groups, s, b), dtype=torch.float32, device=device)
    total, rows = s * b, s // chunk_count(halo, value_halo, starts)
    if total:
        projected = _aligned(projected)
        table, rope_row_stride, rope_batch_stride, rotary = _rope(rope)
        call(
            "ho_cca_prologue", projected, *map(_aligned, contiguous(*parameters[:4])),
            temperature.float().contiguous(), table,
            *map(_aligned, contiguous(halo, value_halo)), *contiguous(starts), query, key, value, inverse_norm,
            projected.stride(0), projected.stride(1), rope_row_stride, rope_batch_stride, total, rows, b, heads,
            query_groups, rotary, delayed_channels, multiprocessors(device), device=device,
        )
    return query, key, value, inverse_norm


def cca_prologue_backward(
    d_query: Tensor, d_key: Tensor, d_value: Tensor, projected: Tensor, depthwise_weight: Tensor,
    depthwise_bias: Tensor, grouped_weight: Tensor, grouped_bias: Tensor, temperature: Tensor, rope: Tensor | None,
    halo: Tensor | None, value_halo: Tensor | None, starts: Tensor | None, query: Tensor, key: Tensor,
    inverse_norm: Tensor, query_groups: int, delayed_channels: int,
) -> tuple[Tensor, ...]:
    """As reference.cca_prologue_backward."""
    parameters = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, temperature)
    device, processors, (s, b) = projected.device, multiprocessors(projected.device), projected.shape[:2]
    inputs = (projected, *parameters, halo, value_halo)
    gradients = empty_results(*inputs, like=projected)
    total, rows = s * b, s // chunk_count(halo, value_halo, starts)
    if not total:
        return tuple(gradient.zero_() for gradient in gradients)
    d_projected, *d_parameters, d_halo, d_value_halo = gradients
    n = len(grouped_bias) // HEAD_DIM
    heads = n - query_groups
    d_query, d_key, d_value, projected, query, key = map(
        _aligned, (d_query, d_key, d_value, projected, query.contiguous(), key.contiguous())
    )
    *weights, length = (*map(_aligned, contiguous(*parameters[:4])), temperature.float().contiguous())
    halo, starts = contiguous(halo, starts)
    halo = _aligned(halo)
    table, *rope_strides, rotary = _rope(rope)
    runs = library(target_of(device)).ho_cca_prologue_backward_blocks(
        total, rows, b, heads, query_groups, halo is not None, processors
    )
    zero_runs = min(total, ZERO_RUNS)
    shapes = (
        (runs, n, 3, HEAD_DIM, HEAD_DIM),
        (runs, n, HEAD_DIM),
        (runs, query_groups),
        (zero_runs, query_groups),
        (query_groups,),
    )
    partial, partial_bias, partial_temperature, partial_zero, of_temperature = (
        torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes
    )
    dy = torch.empty((s, b, n, HEAD_DIM), dtype=projected.dtype, device=device)
    strides, sizes = (*projected.stride()[:2], *rope_strides), (total, rows, b, heads, query_groups, rotary)
    call(
        "ho_cca_prologue_backward", d_query, d_key, d_value, query, key, inverse_norm, length, table, projected, halo,
        weights[0], weights[2], starts, dy, d_projected, None if halo is None else d_halo,
        None if value_halo is None else d_value_halo, partial, partial_bias, partial_temperature, *d_query.stride()[:3],
        *d_key.stride()[:3], *d_value.stride()[:3], *strides, *sizes, delayed_channels, processors, device=device,
    )
    call(
        "ho_cca_prologue_parameters", d_key, projected, *weights, length, table, halo, starts, partial, partial_bias,
        partial_temperature, partial_zero, *d_parameters[:4], of_temperature, *strides, *d_key.stride()[:3], *sizes,
        runs, zero_runs, device=device,
    )
    d_parameters[4].copy_(of_temperature)
    return d_projected, *d_parameters, d_halo, d_value_halo
