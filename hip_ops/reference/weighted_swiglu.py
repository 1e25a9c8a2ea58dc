# SPDX-License-Identifier: Apache-2.0
"""silu(gate) * up * prob in plain torch, forward and backward written out (SwiGLU: arXiv 2002.05202; transformers `ZayaExperts`).

The model's own experts (zaya_plugin.model.experts) call these functions too, so that on a CPU a model gives the same losses with
the operator and without it. All arithmetic is fp32, or fp64 for fp64 tensors, and each result is rounded once, at its end.

Shapes: gate_up [n, 2 f], gate first; probs [n]; output and its gradient [n, f]. offsets int32 [experts] or None: rows at and beyond
offsets[-1] belong to no expert; they are not read, and their results are zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.reference.expert_permutation import compute_dtype


def _nobody(offsets: Tensor | None, rows: int) -> Tensor | None:
    return None if offsets is None else torch.arange(rows, device=offsets.device) >= offsets[-1]


def _cleared(rows: Tensor, nobody: Tensor | None) -> Tensor:
    if nobody is None:
        return rows
    return rows.masked_fill_(nobody if rows.dim() == 1 else nobody.unsqueeze(-1), 0)


def weighted_swiglu(gate_up: Tensor, probs: Tensor, offsets: Tensor | None) -> Tensor:
    """silu(gate) * up * prob, in gate_up's dtype."""
    compute = compute_dtype(gate_up)
    gate, up = gate_up.to(compute).chunk(2, dim=-1)
    product = torch.nn.functional.silu(gate) * up * probs.to(compute).unsqueeze(-1)
    return _cleared(product.to(gate_up.dtype), _nobody(offsets, len(gate_up)))


def weighted_swiglu_backward(
    grad: Tensor, gate_up: Tensor, probs: Tensor, offsets: Tensor | None, with_output: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """d_gate_up [n, 2 f], d_probs [n], and the output [n, f] again, or an empty tensor without `with_output`."""
    compute = compute_dtype(gate_up)
    gate, up = gate_up.to(compute).chunk(2, dim=-1)
    grad, weight = grad.to(compute), probs.to(compute).unsqueeze(-1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    product = silu * up
    d_probs = (grad * product).sum(-1)
    grad = grad * weight
    # d silu(gate) = sigmoid + silu * (1 - sigmoid)
    d_gate = grad * up * torch.addcmul(sigmoid, silu, 1 - sigmoid)
    d_gate_up = torch.cat((d_gate, grad * silu), dim=-1).to(gate_up.dtype)
    nobody = _nobody(offsets, len(gate_up))
    output = _cleared((product * weight).to(gate_up.dtype), nobody) if with_output else gate_up.new_empty(0)
    return _cleared(d_gate_up, nobody), _cleared(d_probs.to(probs.dtype), nobody), output
