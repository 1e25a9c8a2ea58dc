# SPDX-License-Identifier: Apache-2.0
"""ZAYA1's router behind its down projection in plain torch, forward and backward written out (arXiv 2605.05365 section
II-A-2).

    state    r = projected + b_down + gamma * r of the layer before
    hidden1  W1 rms_norm(r) + b1            hidden2  W2 gelu(hidden1) + b2            logits  W_out gelu(hidden2)
    choice   the first class with the largest softmax(logits) + balancing bias
    weight   the probability of the choice, without the bias

GELU is the exact one (with erf). The result of every line is computed in fp32 (fp64 for fp64 tensors) from rounded
operands and rounded to the tensors' dtype, as a model in that dtype rounds it; probabilities and their results stay in
fp32. The first NaN among the probabilities is chosen.

Shapes: projected, previous, state, hidden1, hidden2 [n, r]; vectors [r]; w1, w2 [r, r]; w_out [c, r]; biases fp32 [c];
forced int64 [n] replaces the choice where it is not negative; tokens of class `unweighted` (-1: none) get the weight 0
and no gradient.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from hip_ops.runtime.launch import cast, wide
from hip_ops.saved_bytes import router_columns

SUM_NAMES = ("b_down", "gamma", "w_norm", "b1", "b2")  # in the last rows of what `router_mlp_backward` returns


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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return state, weights fp32 [n], ids int64 [n], hidden1, hidden2, logits [n, router_columns(c)], and statistics
    fp32 [c + 1].

    The statistics are the tokens of each class, exact up to 2^24, and the sum of the entropies of the probabilities in
    nats.
    """
    dtype, compute = projected.dtype, wide(projected.dtype)
    state = cast(projected.contiguous(), compute) + b_down
    if gamma is not None:
        state = torch.addcmul(state, cast(previous, compute), cast(gamma, compute))
    state = cast(state, dtype)
    hidden1 = _linear(_normed(state, w_norm, eps)[0], w1, b1)
    hidden2 = _linear(_gelu(hidden1), w2, b2)
    logits = _linear(_gelu(hidden2), w_out)
    probabilities = torch.softmax(logits, dim=-1, dtype=compute)
    ids = (probabilities + biases).argmax(dim=-1)
    if forced is not None:
        ids = torch.where(forced >= 0, forced, ids)
    weights = probabilities.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    if unweighted >= 0:
        weights = weights.masked_fill(ids == unweighted, 0.0)
    statistics = (_chosen(ids, w_out).sum(0, dtype=compute), torch.special.entr(probabilities).sum().unsqueeze(0))
    padded = F.pad(logits, (0, router_columns(logits.shape[1]) - logits.shape[1]))
    return state, weights, ids, hidden1, hidden2, padded, torch.cat(statistics)


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
    trained: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for the gradients d_weights [n] and d_state [n, r] (None: no gradient of state):

    d_projected [n, r], d_previous [n, r] (empty without gamma) and the parameters' gradients fp32 [2 r + c + 5, r], not
    rounded: those of w1, w2, w_out and SUM_NAMES, of which gamma's is zero without it; empty without `trained`.
    """
    dtype, compute = state.dtype, wide(state.dtype)
    probabilities = torch.softmax(logits[:, : len(w_out)], dim=-1, dtype=compute)
    if unweighted >= 0:
        d_weights = d_weights.masked_fill(ids == unweighted, 0.0)
    d_probabilities = _chosen(ids, w_out) * d_weights.unsqueeze(-1)
    d_logits = cast(torch._softmax_backward_data(d_probabilities, probabilities, -1, compute), dtype)
    d_hidden2 = _gelu_backward(_linear(d_logits, w_out.t()), hidden2)
    d_hidden1 = _gelu_backward(_linear(d_hidden2, w2.t()), hidden1)
    d_normed = cast(_linear(d_hidden1, w1.t()), compute)
    normed, direction, inverse = _normed(state, w_norm, eps)
    along = d_normed * direction
    upstream = d_normed * cast(w_norm, compute)
    common = (upstream * direction).mean(-1, keepdim=True)
    d_wide = torch.addcmul(upstream, direction, common, value=-1) * inverse
    if d_state is not None:
        d_wide = d_wide + d_state
    d_previous, d_gamma = state.new_empty(0), d_wide.new_zeros(d_wide.shape[1])
    if gamma is not None:
        d_previous, d_gamma = cast(d_wide * gamma, dtype), (d_wide * previous).sum(0)
    if not trained:
        return cast(d_wide, dtype), d_previous, d_wide.new_empty(0)
    pairs = ((d_hidden1, normed), (d_hidden2, _gelu(hidden1)), (d_logits, _gelu(hidden2)))
    products = (cast(a, compute).t() @ cast(b, compute) for a, b in pairs)
    sums = (d_wide.sum(0), d_gamma, *(of_rows.sum(0, dtype=compute) for of_rows in (along, d_hidden1, d_hidden2)))
    return cast(d_wide, dtype), d_previous, torch.cat((*products, torch.stack(sums)))


def _chosen(ids: Tensor, w_out: Tensor) -> Tensor:
    return ids.unsqueeze(-1) == torch.arange(len(w_out), device=ids.device)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    compute = wide(x.dtype)
    product = F.linear(cast(x, compute), cast(weight, compute), None if bias is None else cast(bias, compute))
    return cast(product, x.dtype)


def _gelu(x: Tensor) -> Tensor:
    return cast(F.gelu(cast(x, wide(x.dtype))), x.dtype)


def _gelu_backward(grad: Tensor, x: Tensor) -> Tensor:
    """Return grad * gelu'(x), gelu'(x) = (1 + erf(x / sqrt 2)) / 2 + x exp(-x^2 / 2) / sqrt(2 pi); rounded to x's
    dtype.
    """
    compute = wide(x.dtype)
    return cast(torch.ops.aten.gelu_backward(cast(grad, compute), cast(x, compute)), x.dtype)


def _normed(state: Tensor, w_norm: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm in state's dtype, the norm without w_norm, and 1 / the root of the mean square; the last two in
    the compute dtype.
    """
    value = cast(state, wide(state.dtype))
    inverse = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    direction = value * inverse
    return cast(direction * cast(w_norm, value.dtype), state.dtype), direction, inverse
