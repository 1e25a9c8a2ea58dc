# SPDX-License-Identifier: Apache-2.0
"""Launches the Triton kernels of ZAYA1's router (triton_kernels.py). Same functions and conventions as reference.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.ops.router_mlp.reference import SUM_NAMES
from hip_ops.runtime.code_objects import launch_triton_kernel
from hip_ops.runtime.launch import WARP_SIZE, Launch, contiguous, plan
from hip_ops.saved_bytes import router_columns

TILE_NAMES = ("BLOCK", "PART", "num_stages")


def launch(width: int, *, warp_size: int) -> Launch:
    """Choose the tile of both kernels for a router of `width` channels.
    """
    if warp_size == 64:
        return Launch(32, 32, 4, stages=2)
    return Launch(64, min(width, 64), 4, stages=2)


def parameters_launch(width: int, *, warp_size: int) -> Launch:
    """Choose the tile of a matrix's gradient and the number of slabs: one program a multiprocessor of an H200, where
    more slabs are slower, five for six compute units of an MI300X. The rows are those of `launch`, whose sums it reads.
    """
    rows, tile = launch(width, warp_size=warp_size).rows, min(width, 128)
    if warp_size == 64:
        return Launch(rows, tile, 4, programs=32, stages=2)
    return Launch(rows, tile, 8 if tile == 128 else 4, programs=16, stages=3)


def router_mlp(
    projected: Tensor, previous: Tensor | None, gamma: Tensor | None, b_down: Tensor, w_norm: Tensor, w1: Tensor,
    b1: Tensor, w2: Tensor, b2: Tensor, w_out: Tensor, biases: Tensor, forced: Tensor | None, eps: float,
    unweighted: int,
) -> tuple[Tensor, ...]:
    """As reference.router_mlp."""
    projected, previous, gamma, b_down, w_norm, w1, b1, w2, b2, w_out, biases, forced = contiguous(
        projected, previous, gamma, b_down, w_norm, w1, b1, w2, b2, w_out, biases, forced
    )
    (rows, width), classes, device = projected.shape, w_out.shape[0], projected.device
    grid, keywords = plan(launch, TILE_NAMES, (rows,), width)
    columns = router_columns(classes)
    state, hidden1, hidden2 = (torch.empty_like(projected) for _ in range(3))
    logits = torch.empty((rows, columns), dtype=projected.dtype, device=device)
    weights, ids = (
        torch.empty(rows, dtype=torch.float32, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
    )
    statistics = torch.empty((*grid, classes + 1), dtype=torch.float32, device=device)
    launch_triton_kernel(
        "router_mlp", "router_mlp_forward_kernel", grid, projected, projected if gamma is None else previous,
        b_down if gamma is None else gamma, b_down, w_norm, w1, b1, w2, b2, w_out, biases,
        ids if forced is None else forced, state, weights, ids, hidden1, hidden2, logits, statistics, rows, eps,
        unweighted, HAS_PREVIOUS=gamma is not None, HAS_FORCED=forced is not None, R=width, CLASSES=classes,
        COLUMNS=columns, device=device, **keywords,
    )
    return state, weights, ids, hidden1, hidden2, logits, statistics.sum(0)


def router_mlp_backward(
    d_weights: Tensor, d_state: Tensor | None, state: Tensor, previous: Tensor | None, gamma: Tensor | None,
    hidden1: Tensor, hidden2: Tensor, logits: Tensor, ids: Tensor, w_norm: Tensor, w1: Tensor, w2: Tensor,
    w_out: Tensor, eps: float, unweighted: int, trained: bool,
) -> tuple[Tensor, ...]:
    """As reference.router_mlp_backward."""
    d_weights, d_state, state, previous, gamma, hidden1, hidden2, logits, ids, w_norm, w1, w2, w_out = contiguous(
        d_weights, d_state, state, previous, gamma, hidden1, hidden2, logits, ids, w_norm, w1, w2, w_out
    )
    (rows, width), classes, device = state.shape, w_out.shape[0], state.device
    grid, keywords = plan(launch, TILE_NAMES, (rows,), width)
    d_hidden, inputs = (torch.empty((2, rows, width), dtype=state.dtype, device=device) for _ in range(2))
    d_projected, active2 = torch.empty_like(state), torch.empty_like(state)
    d_previous = torch.empty_like(state) if gamma is not None else state.new_empty(0)
    d_logits = torch.empty_like(logits)
    sums = torch.empty((*grid, 3, width), dtype=torch.float32, device=device)
    constants = {"R": width, "CLASSES": classes, "COLUMNS": router_columns(classes), "device": device}
    launch_triton_kernel(
        "router_mlp", "router_mlp_backward_kernel", grid, d_weights, state if d_state is None else d_state, state,
        state if gamma is None else previous, w_norm if gamma is None else gamma, hidden1, hidden2, logits, ids, w_norm,
        w1, w2, w_out, d_projected, d_previous, sums, d_hidden[0], inputs[0], d_hidden[1], inputs[1], d_logits, active2,
        rows, eps, unweighted, HAS_PREVIOUS=gamma is not None, HAS_D_STATE=d_state is not None, **constants, **keywords,
    )
    if not trained:
        return d_projected, d_previous, sums.new_empty(0)
    tiles = 2 * width * width // parameters_launch(width, warp_size=WARP_SIZE).columns
    grid, keywords = plan(parameters_launch, ("BLOCK", "TILE", "num_stages"), (rows, tiles), width)
    slabs = torch.empty((grid[0], 2 * width + classes + len(SUM_NAMES), width), dtype=torch.float32, device=device)
    launch_triton_kernel(
        "router_mlp", "router_mlp_parameters_kernel", grid, d_hidden, inputs, d_logits, active2, sums, slabs, rows,
        **constants, **keywords,
    )
    return d_projected, d_previous, slabs.sum(0)
