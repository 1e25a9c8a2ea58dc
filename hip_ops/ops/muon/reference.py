# SPDX-License-Identifier: Apache-2.0
"""Muon's momentum and weight update on lists of tensors in plain torch: the definition that the kernels are compared
with.

Arithmetic is fp32 for all dtypes of tensors (fp64 where the momentum or the parameter is fp64); each result is rounded
once when it is stored. The host never waits: the skip flag, the gradient scale and the learning rate stay tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    return torch.float64 if any(t is not None and t.dtype == torch.float64 for t in tensors) else torch.float32


def _store(target: Tensor, value: Tensor, skip: Tensor | None) -> None:
    """Store `value`, rounded, in `target`, or nothing where `skip` holds; a select, so that a NaN in `value` is not
    stored.
    """
    value = value.to(target.dtype)
    target.copy_(value if skip is None else torch.where(skip, target, value))


def muon_momentum_(
    gradients: Sequence[Tensor],
    momenta: Sequence[Tensor],
    outputs: Sequence[Tensor],
    square_sums: Tensor | None,
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
    momentum: float,
    nesterov: bool,
) -> None:
    """As `hip_ops.muon_momentum_`; the output is computed from the momentum as it was stored."""
    skip = None if found_inf is None else found_inf.reshape(()) != 0
    for i, (gradient, buffer, output) in enumerate(zip(gradients, momenta, outputs, strict=True)):
        dtype = _compute_dtype(gradient, buffer, output)
        g, old = gradient.to(dtype), buffer.to(dtype)
        if grad_scale is not None:
            g = g * grad_scale.reshape(()).to(dtype)
        new = torch.lerp(old, g, 1 - momentum)
        stored = new.to(buffer.dtype).to(dtype)
        out = torch.lerp(g, stored, momentum) if nesterov else stored
        _store(buffer, new, skip)
        _store(output, out, skip)
        if square_sums is not None:
            squares = out.to(output.dtype).to(dtype).square().sum()
            _store(square_sums.view(-1)[i], squares, skip)


def muon_update_(
    updates: Sequence[Tensor],
    masters: Sequence[Tensor],
    params: Sequence[Tensor],
    scales: Sequence[float],
    lr: float,
    lr_tensor: Tensor | None,
    weight_decay: float,
    found_inf: Tensor | None,
) -> None:
    """As `hip_ops.muon_update_`; `masters` is empty or holds one fp32 tensor for every parameter."""
    skip = None if found_inf is None else found_inf.reshape(()) != 0
    for i, (update, param, scale) in enumerate(zip(updates, params, scales, strict=True)):
        weight = masters[i] if masters else param
        dtype = _compute_dtype(update, weight)
        w, u = weight.to(dtype), update.to(dtype)
        if lr_tensor is None:  # the operations of torch.optim.Muon, so that fp32 results are the same bits
            new = torch.add(w * (1 - lr * weight_decay), u, alpha=-lr * scale)
        else:
            rate = lr_tensor.reshape(()).to(dtype)
            new = torch.addcmul(w * (1 - rate * weight_decay), u, rate * scale, value=-1)
        if masters:
            _store(weight, new, skip)
        _store(param, new, skip)
