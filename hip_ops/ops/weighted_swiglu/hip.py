# SPDX-License-Identifier: Apache-2.0
"""Host side of weighted_swiglu.hip: allocates the results and calls the launchers. Same functions as
reference.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.runtime.launch import as_rows, contiguous, empty_results
from hip_ops.runtime.launchers import call_rows


def _halves(gate_up: Tensor) -> Tensor:
    """Return the gates: gate and up start and end at multiples of 16 bytes if half a row does."""
    return gate_up[:, : gate_up.shape[1] // 2]


def weighted_swiglu(gate_up: Tensor, probs: Tensor, offsets: Tensor | None) -> Tensor:
    """As reference.weighted_swiglu."""
    device, rows, width = gate_up.device, gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=device)
    gate_up, (probs, offsets) = as_rows(gate_up), contiguous(probs, offsets)
    call_rows(
        "ho_weighted_swiglu", gate_up, probs, offsets, out, rows, width, gate_up.stride(0),
        0 if offsets is None else len(offsets), gate_up.element_size(), probs.element_size(),
        wide=(_halves(gate_up), out), device=device,
    )
    return out


def weighted_swiglu_backward(
    grad: Tensor, gate_up: Tensor, probs: Tensor, offsets: Tensor | None, with_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """As reference.weighted_swiglu_backward."""
    device, (rows, width) = grad.device, grad.shape
    d_gate_up, d_probs = empty_results(gate_up, probs, like=gate_up)
    out = torch.empty((rows, width) if with_output else 0, dtype=gate_up.dtype, device=device)
    grad, gate_up, (probs, offsets) = as_rows(grad), as_rows(gate_up), contiguous(probs, offsets)
    call_rows(
        "ho_weighted_swiglu_backward", grad, gate_up, probs, offsets, d_gate_up, d_probs,
        out if with_output else None, rows, width, grad.stride(0), gate_up.stride(0),
        0 if offsets is None else len(offsets), gate_up.element_size(), probs.element_size(),
        wide=(grad, _halves(gate_up), d_gate_up), device=device,
    )
    return d_gate_up, d_probs, out
