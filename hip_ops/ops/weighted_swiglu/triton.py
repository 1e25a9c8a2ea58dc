# SPDX-License-Identifier: Apache-2.0
"""SwiGLU with the routing weight in Triton: one kernel forward, one backward. No atomics; the host never waits.

Same functions as reference.py. Importing this module imports triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hip_ops.runtime.launch import Launch, as_rows, empty_results, plan, run_kernel

TILE_NAMES = ("ROWS", "BLOCK")


@triton.jit
def _live_rows(offsets, row, rows, experts, HAS_OFFSETS: tl.constexpr):
    """Return which of the rows belong to an expert."""
    live = row < rows
    if HAS_OFFSETS:
        live = live & (row < tl.load(offsets + experts - 1))
    return live


@triton.jit
def weighted_swiglu_forward_kernel(
    gate_up, probs, offsets, out, rows, width, gate_up_stride, experts, HAS_OFFSETS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute silu(gate) * up * prob of one tile [ROWS, BLOCK]."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = _live_rows(offsets, row, rows, experts, HAS_OFFSETS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    within = columns < width
    read, of_row = live[:, None] & within, row.to(tl.int64)[:, None]
    at = gate_up + of_row * gate_up_stride + columns
    gate = tl.load(at, mask=read, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=read, other=0.0).to(tl.float32)
    prob = tl.load(probs + row, mask=live, other=0.0).to(tl.float32)[:, None]
    silu = gate * (1.0 / (1.0 + tl.exp(-gate)))
    tl.store(
        out + of_row * width + columns, (silu * up * prob).to(out.dtype.element_ty), mask=(row < rows)[:, None] & within
    )


@triton.jit
def weighted_swiglu_backward_kernel(
    grad, gate_up, probs, offsets, d_gate_up, d_probs, out, rows, width, grad_stride, gate_up_stride, experts,
    HAS_OFFSETS: tl.constexpr, WITH_OUTPUT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):
    """Compute d_gate_up, d_probs and, WITH_OUTPUT, the output of ROWS rows."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    live = _live_rows(offsets, row, rows, experts, HAS_OFFSETS)
    of_row = row.to(tl.int64)[:, None]
    prob = tl.load(probs + row, mask=live, other=0.0).to(tl.float32)[:, None]
    d_prob = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        columns = start + tl.arange(0, BLOCK)[None, :]
        within = columns < width
        read, write = live[:, None] & within, inside[:, None] & within
        at = gate_up + of_row * gate_up_stride + columns
        gate = tl.load(at, mask=read, other=0.0).to(tl.float32)
        up = tl.load(at + width, mask=read, other=0.0).to(tl.float32)
        upstream = tl.load(grad + of_row * grad_stride + columns, mask=read, other=0.0).to(tl.float32)
        sigmoid = 1.0 / (1.0 + tl.exp(-gate))
        silu = gate * sigmoid
        product = silu * up
        d_prob += upstream * product
        weighted = upstream * prob
        d_gate = weighted * up * tl.fma(silu, 1.0 - sigmoid, sigmoid)
        to = d_gate_up + of_row * (2 * width) + columns
        tl.store(to, d_gate.to(d_gate_up.dtype.element_ty), mask=write)
        tl.store(to + width, (weighted * silu).to(d_gate_up.dtype.element_ty), mask=write)
        if WITH_OUTPUT:
            tl.store(out + of_row * width + columns, (product * prob).to(out.dtype.element_ty), mask=write)
    tl.store(d_probs + row, tl.sum(d_prob, axis=1).to(d_probs.dtype.element_ty), mask=inside)


def launch(width: int, element_bytes: int, *, backward: bool, warp_size: int) -> Launch:
    """Choose the tile for outputs of `width` columns: 16 bytes of each tensor per lane.

    Two rows of ZAYA1's width per program, as measured on an H100, where evict_first made every kernel 1 to 2 % slower.
    """
    block = min(max(triton.next_power_of_2(width), 128), (8192 if backward else 4096) // element_bytes)
    rows = max(1, (8192 if warp_size == 32 else 4096) // (block * element_bytes))
    return Launch(rows, block, min(max(rows * block * element_bytes // (16 * warp_size), 1), 1024 // warp_size))


def weighted_swiglu(gate_up: Tensor, probs: Tensor, offsets: Tensor | None) -> Tensor:
    """As reference.weighted_swiglu."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    gate_up, probs = as_rows(gate_up), probs.contiguous()
    grid, keywords = plan(launch, TILE_NAMES, (rows, width), width, gate_up.element_size(), backward=False)
    run_kernel(
        weighted_swiglu_forward_kernel, grid, gate_up, probs, probs if offsets is None else offsets.contiguous(), out,
        rows, width, gate_up.stride(0), 0 if offsets is None else offsets.shape[0], HAS_OFFSETS=offsets is not None,
        device=gate_up.device, **keywords,
    )
    return out


def weighted_swiglu_backward(
    grad: Tensor, gate_up: Tensor, probs: Tensor, offsets: Tensor | None, with_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As reference.weighted_swiglu_backward."""
    rows, width = grad.shape
    d_gate_up, d_probs = empty_results(gate_up, probs, like=gate_up)
    out = torch.empty((rows, width) if with_output else 0, dtype=gate_up.dtype, device=grad.device)
    grad, gate_up, probs = as_rows(grad), as_rows(gate_up), probs.contiguous()
    grid, keywords = plan(launch, TILE_NAMES, (rows,), width, gate_up.element_size(), backward=True)
    run_kernel(
        weighted_swiglu_backward_kernel, grid, grad, gate_up, probs, probs if offsets is None else offsets.contiguous(),
        d_gate_up, d_probs, out, rows, width, grad.stride(0), gate_up.stride(0),
        0 if offsets is None else offsets.shape[0], HAS_OFFSETS=offsets is not None, WITH_OUTPUT=with_output,
        device=grad.device, **keywords,
    )
    return d_gate_up, d_probs, out
