# SPDX-License-Identifier: Apache-2.0
"""ZAYA1's router behind its down projection as torch operators: state, MLP and choice in one pass, and their gradients
in another.

Conventions that all versions share are in reference.py. The operators register no gradients: callers build the backward
pass from `router_mlp_backward`, whose fp32 gradients of the parameters they may add directly to main gradients.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from hip_ops.ops.router_mlp import reference
from hip_ops.runtime.model_sizes import model_sizes
from hip_ops.runtime.operator import Operator
from hip_ops.runtime.self_check import TOLERANCES, compare_tensors, worst
from hip_ops.saved_bytes import router_columns

TRITON_WIDTHS = (32, 64, 128, 256)
MAX_CLASSES = 64  # of the Triton kernels


class RouterParameters(NamedTuple):
    """A router's parameters behind its down projection: gamma (None in a first layer), b_down, w_norm, b1, b2 [r];
    w1, w2 [r, r]; w_out [c, r], all of one dtype; and the balancing biases fp32 [c], for the choice only.
    """

    gamma: Tensor | None
    b_down: Tensor
    w_norm: Tensor
    w1: Tensor
    b1: Tensor
    w2: Tensor
    b2: Tensor
    w_out: Tensor
    biases: Tensor


class Routed(NamedTuple):
    """state, hidden1, hidden2 [n, r] and logits [n, router_columns(c)], zeros after the classes, in the tensors' dtype;
    weights fp32 [n]; ids int64 [n]; statistics fp32 [c + 1]: the tokens of each class, exact up to 2^24, and the sum of
    the entropies (nats) of the tokens' probabilities."""

    state: Tensor
    weights: Tensor
    ids: Tensor
    hidden1: Tensor
    hidden2: Tensor
    logits: Tensor
    statistics: Tensor


class RouterGradients(NamedTuple):
    """The results of `router_mlp_backward`: d_projected and d_previous [n, r], the latter None without gamma. In fp32,
    None with trained=False: d_w1, d_w2 [r, r], d_out [c, r] and sums [5, r], the gradients of b_down, gamma (zeros
    without it), w_norm, b1 and b2.
    """

    d_projected: Tensor
    d_previous: Tensor | None
    d_w1: Tensor | None
    d_w2: Tensor | None
    d_out: Tensor | None
    sums: Tensor | None


def _example(device: torch.device, first: bool = False, replay: bool = True) -> tuple:
    """Make inputs of ZAYA1's width and the model's classes in bf16, with a partly filled last tile; as in training a multiple of
    16 rows, for which Triton compiles another kernel. first: of the model's first layer, without a previous state.
    replay: some tokens have a given class.
    """
    rows, r, c = 144, 256, min(model_sizes().classes, MAX_CLASSES)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    projected, previous, gamma, b_down = random(rows, r), random(rows, r), random(r), random(r)
    w1, w2, w_out = random(r, r) / 16, random(r, r) / 16, random(c, r) / 2
    before = (None, None) if first else (previous.bfloat16(), gamma.bfloat16())
    tensors = (b_down, 1 + random(r) / 4, w1, random(r) / 4, w2, random(r) / 4, w_out)
    forced = torch.where(torch.arange(rows, device=device) % 5 == 0, min(3, c - 1), -1)
    parameters = (tensor.bfloat16() for tensor in tensors)
    return projected.bfloat16(), *before, *parameters, random(c) / 16, forced if replay else None, 1e-5, c - 1


def _backward_example(device: torch.device, first: bool = False, last: bool = False) -> tuple:
    """Make gradients and the results of `_example`. last: of the model's last layer, whose state has no gradient."""
    inputs = _example(device, first)
    _, previous, gamma, _, w_norm, w1, _, w2, _, w_out, _, _, eps, unweighted = inputs
    state, weights, ids, hidden1, hidden2, logits, _ = reference.router_mlp(*inputs)
    saved = (state, previous, gamma, hidden1, hidden2, logits, ids, w_norm, w1, w2, w_out)
    return torch.randn_like(weights), None if last else torch.randn_like(state), *saved, eps, unweighted, True


def _compare(got: list, want: list, tolerance: float) -> str | None:
    """Return the difference, or None. If a token's two best classes are equal within rounding, both are right; weights
    are compared where choices agree.
    """
    (mine, theirs), arguments = (Routed(*got[0]), Routed(*want[0])), want[1]
    same = mine.ids == theirs.ids
    biased = torch.softmax(theirs.logits[:, : len(arguments[9])].float(), -1) + arguments[10]
    first, second = biased.topk(2).values.unbind(-1)
    if (~same & (first - second > 2**-6)).any():
        return "it chooses other classes where the best is clear"
    if mine.statistics[:-1].tolist() != torch.bincount(mine.ids, minlength=len(arguments[9])).tolist():
        return "the counts of its classes do not match its choices"
    pairs = {name: (getattr(mine, name), getattr(theirs, name)) for name in ("state", "hidden1", "hidden2", "logits")}
    pairs |= {
        "weights": (mine.weights * same, theirs.weights * same),
        "entropy": (mine.statistics[-1], theirs.statistics[-1]),
    }
    allowed = {"weights": tolerance, "logits": 2 * TOLERANCES[torch.bfloat16]}
    for name, (a, b) in pairs.items():
        text = worst(name, a, b, allowed.get(name, TOLERANCES[mine.state.dtype]))
        if text:
            return text
    return None


def _parts(gradients: Tensor) -> tuple[Tensor, ...]:
    """Split the parameters' gradients [2 r + c + 5, r] into d_w1, d_w2, d_out and sums."""
    rows, width = gradients.shape
    return gradients.split((width, width, rows - 2 * width - len(reference.SUM_NAMES), len(reference.SUM_NAMES)))


def _compare_gradients(got: list, want: list, tolerance: float) -> str | None:
    """Return the difference, or None. d_w1, d_w2, d_out and sums are results of their own."""
    both = ([[*results[:2], *_parts(results[2])], arguments] for results, arguments in (got, want))
    return compare_tensors(*both, tolerance)


def _fits(w_out: Tensor) -> bool:
    """Return whether the Triton kernels take this router: half precision, and matrices that fit their tiles."""
    classes, width = w_out.shape
    return w_out.dtype in (torch.bfloat16, torch.float16) and width in TRITON_WIDTHS and classes <= MAX_CLASSES


def _rule(values: dict) -> tuple[str, str] | None:
    classes, columns = values["c"], router_columns(values["c"])
    if (values["previous"] is None) != (values["gamma"] is None):
        return "one of previous and gamma is None", "both or neither"
    if not -1 <= values["unweighted"] < classes:
        return f"unweighted is {values['unweighted']}", f"-1 or one of the {classes} classes"
    if values.get("columns", columns) != columns:
        return f"logits has {values['columns']} columns", f"{columns}, of which the first {classes} are classes"
    return None


PARAMETERS = """
    w_out      [c>0, r>0]    bf16|fp16|fp32
    gamma?     [r]           =w_out
    w_norm     [r]           =w_out
    w1         [r, r]        =w_out
    w2         [r, r]        =w_out
"""
_forward = Operator(
    reference.router_mlp,
    takes=PARAMETERS
    + """
        projected  [n, r]    =w_out
        previous?  [n, r]    =w_out
        b_down     [r]       =w_out
        b1         [r]       =w_out
        b2         [r]       =w_out
        biases     [c]       fp32!
        forced?    [n]       int64
    """,
    rule=_rule,
    example=_example,
    more_examples={"triton": tuple(functools.partial(_example, first=first, replay=False) for first in (False, True))},
    compare=_compare,
    tolerance=2 * TOLERANCES[torch.bfloat16],  # of the weights, which follow the logits
    # torch.compile does not round the logits before the softmax
    tolerances={"compiled": 4 * TOLERANCES[torch.bfloat16]},
    fits={"triton": lambda *arguments: _fits(arguments[9])},
)
_backward = Operator(
    reference.router_mlp_backward,
    takes=PARAMETERS
    + """
        state      [n, r]        =w_out
        previous?  [n, r]        =w_out
        hidden1    [n, r]        =w_out
        hidden2    [n, r]        =w_out
        logits     [n, columns]  =w_out
        ids        [n]           int64
        d_state?   [n, r]        =w_out
        d_weights  [n]           wide(w_out)
    """,
    rule=_rule,
    example=_backward_example,
    more_examples={
        "triton": (functools.partial(_backward_example, first=True), functools.partial(_backward_example, last=True))
    },
    compare=_compare_gradients,
    tolerance=2 * TOLERANCES[torch.bfloat16],  # sums of bf16 numbers, a few of which round the other way
    fits={"triton": lambda *arguments: _fits(arguments[12])},
)


def router_mlp(
    projected: Tensor,
    previous: Tensor | None,
    parameters: RouterParameters,
    forced: Tensor | None = None,
    *,
    eps: float,
    unweighted: int = -1,
) -> Routed:
    """Compute the router behind its down projection (arXiv 2605.05365 section II-A-2; formulas: reference), without
    gradients.

    Args: projected [n, r]; previous [n, r], the state of the layer before, None where parameters.gamma is; forced int64
    [n] replaces the choice where it is not negative, and is below c; unweighted: a class whose tokens get the weight 0,
    or -1. projected and previous have the parameters' dtype: bf16, fp16, fp32 or fp64. The kernels take bf16 and fp16.
    Of equal probabilities with their biases the first class wins. Raises ValueError on wrong shapes, dtypes or devices.
    """
    return Routed(*_forward(projected, previous, *parameters, forced, eps, unweighted))


def router_mlp_backward(
    d_weights: Tensor,
    d_state: Tensor | None,
    routed: Routed,
    previous: Tensor | None,
    parameters: RouterParameters,
    *,
    eps: float,
    unweighted: int = -1,
    trained: bool = True,
) -> RouterGradients:
    """Return the gradients, from those of weights, d_weights fp32 [n] (fp64 for fp64), and of state, d_state [n, r] or
    None.

    routed: what router_mlp returned, of which state, hidden1, hidden2, logits and ids are read. Of the parameters only
    gamma, w_norm and the matrices are read. trained=False computes no gradients of parameters: None. Other arguments and
    errors as there.
    """
    state, _, ids, hidden1, hidden2, logits, _ = routed
    gamma, _, w_norm, w1, _, w2, _, w_out, _ = parameters
    saved = (state, previous, gamma, hidden1, hidden2, logits, ids)
    matrices = (w_norm, w1, w2, w_out)
    d_projected, d_previous, gradients = _backward(d_weights, d_state, *saved, *matrices, eps, unweighted, trained)
    of_parameters = _parts(gradients) if trained else [None] * 4
    return RouterGradients(d_projected, None if gamma is None else d_previous, *of_parameters)
