# SPDX-License-Identifier: Apache-2.0
"""silu(gate) * up * prob in plain torch, forward and backward written out (SwiGLU: arXiv 2002.05202; transformers
`ZayaExperts`).

All arithmetic is fp32, or fp64 for fp64 tensors, and each result is rounded once, at its end. Intermediate results are
overwritten in place, because on a CPU new memory takes more time than the arithmetic.

Shapes: gate_up [n, 2 f], gate first; probs [n]; output and its gradient [n, f]. offsets int32 [experts] or None: rows
at and beyond offsets[-1] are padding rows; they are not read, and their results are zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.runtime.launch import clear_rows_, wide


def _kept(offsets: Tensor | None, rows: int) -> Tensor | None:
    """Return -1 for rows before offsets[-1], else 0."""
    if offsets is None:
        return None
    return torch.arange(rows, device=offsets.device, dtype=torch.int32).sub_(offsets[-1]).clamp_(-1, 0)


def _cleared(rows: Tensor, kept: Tensor | None) -> Tensor:
    return rows if kept is None else clear_rows_(rows, kept)


def weighted_swiglu(gate_up: Tensor, probs: Tensor, offsets: Tensor | None) -> Tensor:
    """Compute silu(gate) * up * prob, in gate_up's dtype."""
    compute = wide(gate_up.dtype)
    gate, up = gate_up.contiguous().to(compute).chunk(2, dim=-1)
    output = torch.nn.functional.silu(gate).mul_(up).mul_(probs.to(compute).unsqueeze(-1))
    return _cleared(output.to(gate_up.dtype), _kept(offsets, len(gate_up)))


def weighted_swiglu_backward(
    grad: Tensor, gate_up: Tensor, probs: Tensor, offsets: Tensor | None, with_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return d_gate_up [n, 2 f], d_probs [n], and the output [n, f] again, or an empty tensor without
    `with_output`.
    """
    compute = wide(gate_up.dtype)
    gate, up = gate_up.contiguous().to(compute).chunk(2, dim=-1)
    grad, weight = grad.contiguous().to(compute), probs.to(compute).unsqueeze(-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    output = silu * up
    d_probs = (grad * output).sum(-1).to(probs.dtype)
    d_silu = sigmoid.addcmul_(silu, 1 - sigmoid)
    grad = grad * weight
    d_up = silu.mul_(grad)
    d_gate_up = torch.cat((grad.mul_(up).mul_(d_silu), d_up), dim=-1).to(gate_up.dtype)
    kept = _kept(offsets, len(gate_up))
    output = _cleared(output.mul_(weight).to(gate_up.dtype), kept) if with_output else gate_up.new_empty(0)
    return _cleared(d_gate_up, kept), _cleared(d_probs, kept), output
