# SPDX-License-Identifier: Apache-2.0
"""ZAYA1's router behind its down projection as torch operators: state, MLP and choice in one pass, and the chain of its gradients in another.

Conventions that all back ends share are in hip_ops/reference/router_mlp.py. Triton in bf16 and fp16, for routers of 32 to 256 channels, powers of two,
and up to 64 classes; the torch reference takes everything. Neither has gradients of its own: callers write the backward pass from `router_mlp_backward`
and the products that it leaves to them, which may go straight into main gradients.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hip_ops.direct import direct_operator
from hip_ops.operator import Operator
from hip_ops.reference import router_mlp as reference
from hip_ops.reference.expert_permutation import compute_dtype
from hip_ops.self_check import TOLERANCES, worst

HALF = (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32, torch.float64)
WIDTHS = (32, 64, 128, 256)  # that there are kernels for
MOST_CLASSES = 64


class Routed(NamedTuple):
    """state, hidden1, hidden2 [n, r] and logits [n, reference.columns(c)], zeros behind the classes, in the tensors' dtype; weights fp32 [n]; ids int64 [n];
    statistics fp32 [c + 1]: the tokens of each class, exact up to 2^24, and the sum of the entropies (nats) of the tokens' probabilities."""

    state: Tensor
    weights: Tensor
    ids: Tensor
    hidden1: Tensor
    hidden2: Tensor
    logits: Tensor
    statistics: Tensor


class RouterGradients(NamedTuple):
    """What `router_mlp_backward` returns: gradients, but those of the matrices, which are d_hidden1^T normed, d_hidden2^T active1 and d_logits^T active2.

    d_previous None without gamma. sums fp32 [5, r]: gradients of b_down, gamma (zeros without it), w_norm, b1 and b2. d_logits [n, c], its rows strided.
    """

    d_projected: Tensor
    d_previous: Tensor | None
    sums: Tensor
    d_hidden1: Tensor
    normed: Tensor
    d_hidden2: Tensor
    active1: Tensor
    d_logits: Tensor
    active2: Tensor


def _example(device: torch.device) -> tuple:
    """ZAYA1's width and classes in bf16, with a last tile that is not full."""
    rows, r, c = 150, 256, 17

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    projected, previous, gamma, b_down = random(rows, r), random(rows, r), random(r), random(r)
    w1, w2, w_out = random(r, r) / 16, random(r, r) / 16, random(c, r) / 2
    tensors = (projected, previous, gamma, b_down, 1 + random(r) / 4, w1, random(r) / 4, w2, random(r) / 4, w_out)
    forced = torch.where(torch.arange(rows, device=device) % 5 == 0, 3, -1)
    return *(tensor.bfloat16() for tensor in tensors), random(c) / 16, forced, 1e-5, c - 1


def _backward_example(device: torch.device) -> tuple:
    projected, previous, gamma, b_down, w_norm, w1, b1, w2, b2, w_out, biases, forced, eps, unweighted = _example(
        device
    )
    state, weights, ids, hidden1, hidden2, logits, *_ = reference.router_mlp(
        projected, previous, gamma, b_down, w_norm, w1, b1, w2, b2, w_out, biases, forced, eps, unweighted
    )
    return (
        torch.randn_like(weights),
        torch.randn_like(state),
        state,
        previous,
        gamma,
        hidden1,
        hidden2,
        logits,
        ids,
        w_norm,
        w1,
        w2,
        w_out,
        eps,
        unweighted,
    )


def _compare(got: list, want: list) -> str | None:
    """Tokens whose two best classes lie closer than rounding may choose either; what hangs on the choice is compared where it is the same."""
    (mine, theirs), arguments = (Routed(*got[0]), Routed(*want[0])), want[1]
    same = mine.ids == theirs.ids
    biased = torch.softmax(theirs.logits[:, : len(arguments[9])].float(), -1) + arguments[10]
    first, second = biased.topk(2).values.unbind(-1)
    if (~same & (first - second > 2**-6)).any():
        return "it chooses other classes where there is no doubt"
    if mine.statistics[:-1].tolist() != torch.bincount(mine.ids, minlength=len(arguments[9])).tolist():
        return "the counts of its classes are not those of its choices"
    pairs = {name: (getattr(mine, name), getattr(theirs, name)) for name in ("state", "hidden1", "hidden2", "logits")}
    pairs |= {
        "weights": (mine.weights * same, theirs.weights * same),
        "entropy": (mine.statistics[-1], theirs.statistics[-1]),
    }
    for name, (a, b) in pairs.items():
        # Probabilities follow logits in bf16.
        said = worst(name, a, b, TOLERANCES[mine.state.dtype] * (2 if name in ("weights", "logits") else 1))
        if said:
            return said
    return None


_TRITON = "hip_ops.triton_kernels.router_mlp"
_forward = Operator(
    "router_mlp", torch=reference.router_mlp, triton=f"{_TRITON}:router_mlp", example=_example, compare=_compare
)
_backward = Operator(
    "router_mlp_backward",
    torch=reference.router_mlp_backward,
    triton=f"{_TRITON}:router_mlp_backward",
    example=_backward_example,
    tolerance=2 * TOLERANCES[torch.bfloat16],  # sums of numbers rounded to bf16, of which a few fall on the other side
)


def _chosen(operator: Operator, like: Tensor, w_out: Tensor):
    classes, width = w_out.shape
    return operator if like.dtype in HALF and width in WIDTHS and classes <= MOST_CLASSES else operator.reference


@direct_operator("hip_ops::router_mlp", mutates_args=())
def _forward_op(
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
    tensors = [
        None if t is None else t.contiguous()
        for t in (projected, previous, gamma, b_down, w_norm, w1, b1, w2, b2, w_out, biases, forced)
    ]
    return _chosen(_forward, projected, w_out)(*tensors, eps, unweighted)


@_forward_op.register_fake
def _(projected, previous, gamma, b_down, w_norm, w1, b1, w2, b2, w_out, biases, forced, eps, unweighted):
    (rows, _), classes, compute = projected.shape, w_out.shape[0], compute_dtype(projected)
    state, hidden1, hidden2 = (projected.new_empty(projected.shape) for _ in range(3))
    return (
        state,
        projected.new_empty(rows, dtype=compute),
        projected.new_empty(rows, dtype=torch.int64),
        hidden1,
        hidden2,
        projected.new_empty(rows, reference.columns(classes)),
        projected.new_empty(classes + 1, dtype=compute),
    )


@direct_operator("hip_ops::router_mlp_backward", mutates_args=())
def _backward_op(
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    given = (d_weights, d_state, state, previous, gamma, hidden1, hidden2, logits, ids, w_norm, w1, w2, w_out)
    return _chosen(_backward, state, w_out)(*(None if t is None else t.contiguous() for t in given), eps, unweighted)


@_backward_op.register_fake
def _(
    d_weights, d_state, state, previous, gamma, hidden1, hidden2, logits, ids, w_norm, w1, w2, w_out, eps, unweighted
):
    d_projected, d_hidden1, normed, d_hidden2, active1, active2 = (state.new_empty(state.shape) for _ in range(6))
    d_previous = state.new_empty(0 if gamma is None else state.shape)
    sums = state.new_empty((len(reference.SUMS), state.shape[1]), dtype=compute_dtype(state))
    return d_projected, d_previous, sums, d_hidden1, normed, d_hidden2, active1, state.new_empty(logits.shape), active2


def _check(
    operator: str, first: str, given: dict[str, Tensor | None], typed: dict[str, torch.dtype], unweighted: int
) -> None:
    """Raises ValueError on shapes, dtypes or devices that do not go together with those of `first`, or, where `typed` says so, another dtype.

    SHAPES: n rows, a router of r channels and c classes, w columns for them.
    """
    like, w_out = given[first], given["w_out"]

    def fail(name: str, what, must: str):
        raise ValueError(f"hip_ops.{operator}: {name} {what}; it must be {must}")

    if like.dim() != 2 or like.shape[1] < 1:
        fail(first, f"has shape {tuple(like.shape)}", "[n, r]")
    if like.dtype not in DTYPES:
        fail(first, f"is {like.dtype}", ", ".join(map(str, DTYPES)))
    if w_out.dim() != 2 or w_out.shape[0] < 1:
        fail("w_out", f"has shape {tuple(w_out.shape)}", f"[c, {like.shape[1]}]")
    sizes = {"n": like.shape[0], "r": like.shape[1], "c": w_out.shape[0], "w": reference.columns(w_out.shape[0])}
    for name, tensor in given.items():
        if tensor is None:
            continue
        shape = tuple(sizes[side] for side in SHAPES[name])
        if tensor.shape != shape:
            fail(name, f"has shape {tuple(tensor.shape)}", f"{shape}")
        if tensor.dtype != typed.get(name, like.dtype):
            fail(name, f"is {tensor.dtype}", f"{typed.get(name, like.dtype)}")
        if tensor.device != like.device:
            fail(name, f"is on {tensor.device}", f"on {like.device}")
    if (given["previous"] is None) != (given["gamma"] is None):
        fail("previous and gamma", "came alone", "given both or not at all")
    if not -1 <= unweighted < sizes["c"]:
        fail("unweighted", f"is {unweighted}", f"-1 or one of the {sizes['c']} classes")


SHAPES = {
    **dict.fromkeys(("projected", "previous", "state", "hidden1", "hidden2", "d_state"), "nr"),
    **dict.fromkeys(reference.SUMS, "r"),
    "w1": "rr",
    "w2": "rr",
    "w_out": "cr",
    "biases": "c",
    "forced": "n",
    "ids": "n",
    "d_weights": "n",
    "logits": "nw",
}


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
    forced: Tensor | None = None,
    *,
    eps: float,
    unweighted: int = -1,
) -> Routed:
    """What follows the down projection of ZAYA1's router (arXiv 2605.05365 section II-A-2; formulas: reference), without gradients.

    Args: projected [n, r]; previous [n, r], the state of the layer before, and gamma [r], or None for both; b_down, w_norm, b1, b2 [r]; w1, w2 [r, r];
    w_out [c, r]; biases fp32 [c], of the choice alone; forced int64 [n], which goes before the choice where it is not negative, and then is below c; unweighted: a class
    whose tokens get the weight 0, or -1. All but the last three share one dtype: bf16 or fp16, for which there are kernels, fp32 or fp64.
    Of equal probabilities with their biases the first class wins. Raises ValueError on wrong shapes, dtypes or devices.
    """
    given = dict(
        projected=projected,
        previous=previous,
        gamma=gamma,
        b_down=b_down,
        w_norm=w_norm,
        w1=w1,
        b1=b1,
        w2=w2,
        b2=b2,
        w_out=w_out,
        biases=biases,
        forced=forced,
    )
    _check("router_mlp", "projected", given, {"biases": torch.float32, "forced": torch.int64}, unweighted)
    return Routed(*_forward_op(*given.values(), eps, unweighted))


def router_mlp_backward(
    d_weights: Tensor,
    d_state: Tensor | None,
    routed: Routed,
    previous: Tensor | None,
    gamma: Tensor | None,
    w_norm: Tensor,
    w1: Tensor,
    w2: Tensor,
    w_out: Tensor,
    *,
    eps: float,
    unweighted: int = -1,
) -> RouterGradients:
    """The way back from the gradients of weights, d_weights fp32 [n] (fp64 of fp64), and of state, d_state [n, r] or None.

    routed: what router_mlp returned, of which state, hidden1, hidden2, logits and ids are read. The rest, and errors, as there.
    """
    state, _, ids, hidden1, hidden2, logits, _ = routed
    given = dict(
        d_weights=d_weights,
        d_state=d_state,
        state=state,
        previous=previous,
        gamma=gamma,
        hidden1=hidden1,
        hidden2=hidden2,
        logits=logits,
        ids=ids,
        w_norm=w_norm,
        w1=w1,
        w2=w2,
        w_out=w_out,
    )
    _check("router_mlp_backward", "state", given, {"d_weights": compute_dtype(state), "ids": torch.int64}, unweighted)
    d_projected, d_previous, sums, *pairs, d_logits, active2 = _backward_op(*given.values(), eps, unweighted)
    return RouterGradients(
        d_projected, None if gamma is None else d_previous, sums, *pairs, d_logits[:, : len(w_out)], active2
    )
