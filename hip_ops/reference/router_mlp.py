# SPDX-License-Identifier: Apache-2.0
"""ZAYA1's router behind its down projection in plain torch, forward and backward written out (arXiv 2605.05365 section II-A-2).

    state    r = projected + b_down + gamma * r of the layer before
    hidden1  W1 rms_norm(r) + b1            hidden2  W2 gelu(hidden1) + b2            logits  W_out gelu(hidden2)
    choice   the first class with the largest softmax(logits) + balancing bias        weight  its probability, without the bias

GELU is the exact one (with erf). Every line's result is rounded to the tensors' dtype, as a model in that dtype rounds it, and computed in fp32 (fp64
for fp64 tensors) from rounded operands; probabilities and what follows from them stay in fp32. A probability that is not a number wins, the first of them.

Shapes: projected, previous, state, hidden1, hidden2 [n, r]; vectors [r]; w1, w2 [r, r]; w_out [c, r]; biases fp32 [c]; forced int64 [n] takes the place of
the choice where it is not negative; tokens of class `unweighted` (-1: none) get the weight 0 and no gradient.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from hip_ops.reference.expert_permutation import compute_dtype

SUMS = ("b_down", "gamma", "w_norm", "b1", "b2")  # the rows of what `router_mlp_backward` sums


def columns(classes: int) -> int:
    """Of the logits and of their gradient: a power of two, as matrix units want it, zeros behind the classes."""
    return max(16, 1 << (classes - 1).bit_length())


def _padded(x: Tensor) -> Tensor:
    return F.pad(x, (0, columns(x.shape[1]) - x.shape[1]))


def _chosen(ids: Tensor, w_out: Tensor) -> Tensor:
    return ids.unsqueeze(-1) == torch.arange(len(w_out), device=ids.device)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    compute = compute_dtype(x)
    return F.linear(x.to(compute), weight.to(compute), None if bias is None else bias.to(compute)).to(x.dtype)


def _gelu(x: Tensor) -> Tensor:
    return F.gelu(x.to(compute_dtype(x))).to(x.dtype)


def _inverse_rms(wide: Tensor, eps: float) -> Tensor:
    return torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


def _normed(state: Tensor, w_norm: Tensor, eps: float) -> Tensor:
    wide = state.to(compute_dtype(state))
    return (wide * _inverse_rms(wide, eps) * w_norm.to(wide.dtype)).to(state.dtype)


def router_mlp(
    projected: Tensor,
    previous: Tensor | None,
    gamma: Tensor | None,
    b_down: Tensor,
    w_norm: Tensor,
    w1: Tensor,
    b1: Tensor,
    w2: Tensor,
    b2: Tensor,
    w_out: Tensor,
    biases: Tensor,
    forced: Tensor | None,
    eps: float,
    unweighted: int,
) -> tuple[Tensor, ...]:
    """state, weights fp32 [n], ids int64 [n], hidden1, hidden2, logits [n, columns(c)], and statistics fp32 [c + 1]: the tokens of each class, exact up to 2^24, and
    the sum of the entropies of the probabilities in nats."""
    compute = compute_dtype(projected)
    state = projected.to(compute) + b_down
    if gamma is not None:
        state = state + previous.to(compute) * gamma
    state = state.to(projected.dtype)
    hidden1 = _linear(_normed(state, w_norm, eps), w1, b1)
    hidden2 = _linear(_gelu(hidden1), w2, b2)
    logits = _linear(_gelu(hidden2), w_out)
    probabilities = torch.softmax(logits, dim=-1, dtype=compute)
    ids = (probabilities + biases).argmax(dim=-1)
    if forced is not None:
        ids = torch.where(forced >= 0, forced, ids)
    weights = probabilities.gather(-1, ids.unsqueeze(-1)).squeeze(-1).masked_fill(ids == unweighted, 0.0)
    statistics = torch.cat(
        (_chosen(ids, w_out).sum(0).to(compute), torch.special.entr(probabilities).sum().unsqueeze(0))
    )
    return state, weights, ids, hidden1, hidden2, _padded(logits), statistics


def _gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """gelu'(x) = (1 + erf(x / sqrt 2)) / 2 + x exp(-x^2 / 2) / sqrt(2 pi); rounded to x's dtype."""
    wide = x.to(compute_dtype(x))
    slope = 0.5 * (1 + torch.erf(wide / math.sqrt(2))) + wide * torch.exp(-0.5 * wide.square()) / math.sqrt(2 * math.pi)
    return (grad.to(wide.dtype) * slope).to(x.dtype)


def router_mlp_backward(
    d_weights: Tensor,
    d_state: Tensor | None,
    state: Tensor,
    previous: Tensor | None,
    gamma: Tensor | None,
    hidden1: Tensor,
    hidden2: Tensor,
    logits: Tensor,
    ids: Tensor,
    w_norm: Tensor,
    w1: Tensor,
    w2: Tensor,
    w_out: Tensor,
    eps: float,
    unweighted: int,
) -> tuple[Tensor, ...]:
    """For the gradients d_weights [n] and d_state [n, r] (None: of nothing that follows):

    d_projected [n, r], d_previous [n, r] (empty without gamma), sums over the rows fp32 [5, r], the gradients of SUMS, and three pairs whose products
    are the gradients of w1, w2 and w_out: d_hidden1 and normed, d_hidden2 and gelu(hidden1) [n, r], d_logits [n, columns(c)] and gelu(hidden2).
    """
    dtype, compute = state.dtype, compute_dtype(state)
    probabilities = torch.softmax(logits[:, : len(w_out)], dim=-1, dtype=compute)
    chosen = _chosen(ids, w_out).to(compute)
    weighted = (probabilities * chosen).sum(-1) * d_weights.to(compute)
    weighted = weighted.masked_fill(ids == unweighted, 0.0).unsqueeze(-1)
    d_logits = (weighted * (chosen - probabilities)).to(dtype)
    d_hidden2 = _gelu_backward(_linear(d_logits, w_out.t()), hidden2)
    d_hidden1 = _gelu_backward(_linear(d_hidden2, w2.t()), hidden1)
    d_normed = _linear(d_hidden1, w1.t()).to(compute)
    wide = state.to(compute)
    inverse = _inverse_rms(wide, eps)
    direction = wide * inverse
    upstream = d_normed * w_norm.to(compute)
    d_wide = inverse * (upstream - direction * (upstream * direction).mean(-1, keepdim=True))
    if d_state is not None:
        d_wide = d_wide + d_state.to(compute)
    d_previous, of_gamma = state.new_empty(0), torch.zeros_like(d_wide[:1])
    if gamma is not None:
        d_previous = (d_wide * gamma).to(dtype)
        of_gamma = d_wide * previous
    rows = (d_wide, of_gamma, d_normed * direction, d_hidden1.to(compute), d_hidden2.to(compute))
    sums = torch.stack([each.sum(0) for each in rows])
    return (
        d_wide.to(dtype),
        d_previous,
        sums,
        d_hidden1,
        _normed(state, w_norm, eps),
        d_hidden2,
        _gelu(hidden1),
        _padded(d_logits),
        _gelu(hidden2),
    )
