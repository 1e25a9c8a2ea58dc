# SPDX-License-Identifier: Apache-2.0
"""Inputs of the router's operators, exact results in fp64, and how far a right result may be from them.

A version is any object with the functions of hip_ops.ops.router_mlp.reference. The exact gradients are autograd's, of the
model's formula written plainly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import hip_ops
from hip_ops.ops.router_mlp import Routed, RouterParameters, reference

EPS = 1e-5
# Of the norm of the exact result. bf16: what its torch reference has is the measure besides, see `check`.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}
# between two probabilities
DOUBT = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}


@dataclass(frozen=True)
class Router:
    """averaged: with the state of a layer before. forced: every third token has its class given. unweighted: the last
    class has the weight 0.
    """

    rows: int
    width: int = 32
    classes: int = 5
    dtype: torch.dtype = torch.float32
    averaged: bool = True
    forced: bool = True
    unweighted: bool = True
    uses_state: bool = True  # by a layer behind
    seed: int = 0

    def __str__(self) -> str:
        flags = "".join(
            letter
            for letter, flag in zip("afus", (self.averaged, self.forced, self.unweighted, self.uses_state), strict=True)
            if flag
        )
        return f"{self.rows}x{self.width}-{self.classes}-{str(self.dtype)[6:]}-{flags}"

    def arguments(self, device="cpu") -> tuple:
        """Those of `router_mlp`. Vectors are far from their first values; logits are some units large."""
        generator = torch.Generator().manual_seed(self.seed)
        n, r, c = self.rows, self.width, self.classes

        def random(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
            return (scale * torch.randn(shape, generator=generator) + shift).to(self.dtype).to(device)

        projected, previous, gamma, b_down = random(n, r), random(n, r), random(r), random(r, scale=0.5)
        w_norm, w1, b1 = random(r, scale=0.25, shift=1.0), random(r, r, scale=r**-0.5), random(r, scale=0.3)
        w2, b2, w_out = random(r, r, scale=1.5 * r**-0.5), random(r, scale=0.3), random(c, r, scale=3 * r**-0.5)
        biases = (0.1 * torch.randn(c, generator=generator)).to(device)
        forced = torch.where(torch.arange(n) % 3 == 1, torch.randint(0, c, (n,), generator=generator), -1).to(device)
        averaging = (previous, gamma) if self.averaged else (None, None)
        return (
            projected,
            *averaging,
            b_down,
            w_norm,
            w1,
            b1,
            w2,
            b2,
            w_out,
            biases,
            forced if self.forced else None,
            EPS,
            c - 1 if self.unweighted else -1,
        )

    def upstream(self, device="cpu") -> tuple[Tensor, Tensor | None]:
        """d_weights and d_state."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        wide = torch.promote_types(self.dtype, torch.float32)
        d_weights = torch.randn(self.rows, generator=generator).to(wide)
        d_state = (0.1 * torch.randn(self.rows, self.width, generator=generator)).to(self.dtype)
        return d_weights.to(device), d_state.to(device) if self.uses_state else None


def exact(arguments: tuple) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple]:
    """state, logits, probabilities without and with the biases, fp64; and the leaves."""
    leaves = [None if t is None else t.detach().cpu().double().requires_grad_() for t in arguments[:10]]
    projected, previous, gamma, b_down, w_norm, w1, b1, w2, b2, w_out = leaves
    state = projected + b_down + (0 if gamma is None else gamma * previous)
    normed = F.rms_norm(state, w_norm.shape, w_norm, arguments[12])
    hidden2 = F.gelu(F.gelu(normed @ w1.T + b1) @ w2.T + b2)
    logits = hidden2 @ w_out.T
    probabilities = logits.softmax(-1)
    return state, logits, probabilities, probabilities.detach() + arguments[10].cpu().double(), leaves


def error(got: Tensor, want: Tensor) -> float:
    """Return the error relative to the norm; infinite for missing or non-finite numbers."""
    assert got.shape == want.shape, f"{tuple(got.shape)} in place of {tuple(want.shape)}"
    difference = (got.detach().cpu().double() - want).norm() / want.norm().clamp_min(1e-12)
    return difference.nan_to_num(float("inf")).item()


def _within(what: str, got: Tensor, want: Tensor, dtype: torch.dtype, of_torch: Tensor | None) -> None:
    """Check that the result is near the exact one and, in bf16 and fp16, hardly farther from it than torch's
    reference in the same dtype.
    """
    found = error(got, want)
    assert found <= TOLERANCE[dtype], f"{what} is wrong: {found:.3g} of its norm"
    if of_torch is not None and want.numel() > 100:
        measure = error(of_torch, want)
        assert found <= 1.25 * measure + 1e-6, f"{what} is wrong: {found:.3g} of its norm, torch's {measure:.3g}"


def parameters_of(arguments: tuple) -> RouterParameters:
    """Those among `Router.arguments`."""
    return RouterParameters(*arguments[2:11])


def public_call(arguments: tuple) -> Routed:
    """hip_ops.router_mlp of `Router.arguments`."""
    options = dict(eps=arguments[12], unweighted=arguments[13])
    return hip_ops.router_mlp(*arguments[:2], parameters_of(arguments), arguments[11], **options)


def check_forward(version, case: Router, device="cpu") -> Routed:
    arguments = case.arguments(device)
    got = Routed(*version.router_mlp(*arguments))
    half = case.dtype in (torch.bfloat16, torch.float16)
    theirs = (
        Routed(*reference.router_mlp(*(t.cpu() if isinstance(t, Tensor) else t for t in arguments))) if half else None
    )
    state, logits, probabilities, biased, _ = exact(arguments)
    assert not got.logits[:, case.classes :].any(), "logits are wrong behind the last class"
    got = got._replace(logits=got.logits[:, : case.classes])
    theirs = theirs._replace(logits=theirs.logits[:, : case.classes]) if half else None
    for name, want in (("state", state), ("logits", logits)):
        assert getattr(got, name).dtype == case.dtype, name
        _within(name, getattr(got, name), want, case.dtype, getattr(theirs, name) if half else None)
    ids, forced = got.ids.cpu(), arguments[11]
    assert ids.dtype == torch.int64 and ((ids >= 0) & (ids < case.classes)).all()
    free = torch.ones(case.rows, dtype=torch.bool) if forced is None else forced.cpu() < 0
    if forced is not None:
        assert torch.equal(ids[~free], forced.cpu()[~free]), "the choice is wrong: a given class was not taken"
    behind = (biased.max(-1).values - biased.gather(-1, ids.unsqueeze(-1)).squeeze(-1))[free]
    assert (behind <= DOUBT[case.dtype]).all(), f"the choice is wrong: {behind.max().item():.3g} behind the best"
    weights = probabilities.detach().gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    weights = weights.masked_fill(ids == arguments[13], 0.0)
    assert (got.weights.cpu() == 0)[ids == arguments[13]].all(), "weights are wrong: not zero"
    worst = (got.weights.cpu().double() - weights).abs().max().item() if case.rows else 0.0
    assert worst <= 2 * DOUBT[case.dtype], f"weights are wrong by {worst:.3g}"
    assert got.statistics[:-1].tolist() == torch.bincount(ids, minlength=case.classes).tolist(), (
        "statistics are wrong: counts"
    )
    entropy = torch.special.entr(probabilities.detach()).sum()
    assert abs(got.statistics[-1].item() - entropy) <= 4 * TOLERANCE[case.dtype] * max(entropy, 1.0), (
        "statistics are wrong: entropy"
    )
    return got


def gradients(results: tuple, classes: int) -> dict[str, Tensor]:
    """By the names of router_mlp's arguments, from the operator's results."""
    d_projected, d_previous, of_parameters = results
    width = of_parameters.shape[1]
    w1, w2, w_out, sums = of_parameters.split((width, width, classes, len(reference.SUM_NAMES)))
    own = {"projected": d_projected, "previous": d_previous, "w1": w1, "w2": w2, "w_out": w_out}
    return own | dict(zip(reference.SUM_NAMES, sums, strict=True))


NAMES = ("projected", "previous", "gamma", "b_down", "w_norm", "w1", "b1", "w2", "b2", "w_out")


def check_backward(version, case: Router, device="cpu") -> None:
    arguments = case.arguments(device)
    on_cpu = tuple(t.cpu() if isinstance(t, Tensor) else t for t in arguments)
    routed = Routed(*reference.router_mlp(*on_cpu))
    upstream = case.upstream()
    given = (
        *upstream,
        routed.state,
        on_cpu[1],
        on_cpu[2],
        routed.hidden1,
        routed.hidden2,
        routed.logits,
        routed.ids,
        on_cpu[4],
        on_cpu[5],
        on_cpu[7],
        on_cpu[9],
    )
    moved = (None if t is None else t.to(device) for t in given)
    got = gradients(version.router_mlp_backward(*moved, *arguments[12:], True), case.classes)
    half = case.dtype in (torch.bfloat16, torch.float16)
    theirs = gradients(reference.router_mlp_backward(*given, *arguments[12:], True), case.classes) if half else {}
    state, _, probabilities, _, leaves = exact(arguments)
    weights = (
        probabilities.gather(-1, routed.ids.unsqueeze(-1)).squeeze(-1).masked_fill(routed.ids == arguments[13], 0.0)
    )
    loss = (weights * upstream[0]).sum() + (0 if upstream[1] is None else (state * upstream[1].double()).sum())
    wanted = {name: leaf for name, leaf in zip(NAMES, leaves, strict=True) if leaf is not None}
    for name, want in zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True):
        _within(f"gradient of {name}", got[name], want, case.dtype, theirs.get(name))
    if not case.averaged:
        assert got["previous"].numel() == 0 and not got["gamma"].any()
