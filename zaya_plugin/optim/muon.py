# SPDX-License-Identifier: Apache-2.0
"""Muon for the matrices and AdamW for the rest in one torch optimizer, which Megatron wraps as it wraps its Adam.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) orthogonalises the momentum by Newton-Schulz; the
update is scaled to AdamW's root mean square, 0.2 * sqrt(max(m, n)) (Liu et al. 2025, arXiv 2502.16982, section 2.2), so
that both share one learning rate and one weight decay. ZAYA1 used Muon so (arXiv 2605.05365, section III).

A parameter may be flat, as Megatron's distributed optimizer keeps its share: what Muon sees of it is its attribute
`muon_matrices = (b, m, n)`. Same-shape matrices of all layers and experts go through Newton-Schulz in one batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hip_ops import muon_momentum_, muon_update_, newton_schulz
from hip_ops.muon.matrix_batches import MatrixBatches
from zaya_plugin.optim.adamw import GroupStepAdamW
from zaya_plugin.optim.sharding.exchange import MatrixExchange

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class MuonSettings:
    """Muon's own settings; learning rate and weight decay come from the parameter groups.

    momentum, nesterov: of the moving average b = lerp(b, g, 1 - momentum).
    steps, coefficients, dtype: Newton-Schulz iterations, their coefficient set (names of hip_ops.newton_schulz) and
        the dtype they run in, "bf16", "fp16" or "fp32".
    rms_scale: the update is scaled by rms_scale * sqrt(max(m, n)).
    momentum_dtype: "fp32" or "bf16", as the momentum is kept.
    elements_at_once: matrices are taken in rounds of about so many elements, which bounds the memory of a step.
    """

    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    coefficients: str = "simple"
    dtype: str = "bf16"
    rms_scale: float = 0.2
    momentum_dtype: str = "fp32"
    elements_at_once: int = 2**27


class MuonAdamW(GroupStepAdamW):
    """Muon on parameters with an attribute `muon_matrices`, torch's AdamW on all others.

    State: `exp_avg`, the momentum, for Muon; `exp_avg` and `exp_avg_sq` for AdamW. A Muon parameter with an attribute
    `muon_target` (a flat tensor of as many elements) has its new value written there too, in the target's dtype. One with
    an attribute `muon_cut` (a CutMatrix) is this rank's piece of a parameter, and `exchange` brings pieces together.
    """

    exchange: MatrixExchange | None = None

    def __init__(self, params, muon: MuonSettings | None = None, **adam):
        self.muon = muon or MuonSettings()
        super().__init__(params, **adam)

    def update(self, group: dict, params: list[Tensor]) -> None:
        muon = [p for p in params if hasattr(p, "muon_matrices")]
        rest = [p for p in params if not hasattr(p, "muon_matrices")]
        if rest:
            super().update(group, rest)
        whole = [p for p in muon if not hasattr(p, "muon_cut")]
        for some in _rounds(whole, self.muon.elements_at_once):
            self.update_matrices(group, some)
        if len(whole) < len(muon):
            self.update_pieces(group, [p for p in muon if hasattr(p, "muon_cut")])

    def update_matrices(self, group: dict, params: Sequence[Tensor]) -> None:
        """Muon of `params` in one round: momentum, Newton-Schulz by shape, update."""
        muon = self.muon
        self.initialise_state(params)
        shapes = [p.muon_matrices[1:] for p in params for _ in range(p.muon_matrices[0])]
        batches = MatrixBatches(shapes, params[0].device, self.between)
        muon_momentum_(
            _matrices(params, [p.grad for p in params]),
            _matrices(params, [self.state[p]["exp_avg"] for p in params]),
            batches.slots,
            momentum=muon.momentum,
            nesterov=muon.nesterov,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
            square_sums=batches.square_sums,  # of what Newton-Schulz divides by its norm, so that it need not read it for that
        )
        updates = batches.split(
            [self.orthogonalise(*pair) for pair in zip(batches.tensors, batches.sums(), strict=True)]
        )
        targets = [getattr(p, "muon_target", None) for p in params]
        assert all(t is None for t in targets) or all(t is not None for t in targets), "one dtype a buffer"
        weights = _matrices(params, params)
        self.apply(group, updates, weights, None if targets[0] is None else _matrices(params, targets), shapes)

    def update_pieces(self, group: dict, params: Sequence[Tensor]) -> None:
        """Muon of parameters that ranks share: like `update_matrices`, with a journey before and after Newton-Schulz."""
        self.initialise_state(params)
        cut = [p.muon_cut for p in params]
        pieces = [torch.empty_like(p, dtype=self.between) for p in params]
        muon_momentum_(
            [p.grad for p in params],
            [self.state[p]["exp_avg"] for p in params],
            pieces,
            momentum=self.muon.momentum,
            nesterov=self.muon.nesterov,
            grad_scale=self.grad_scale,
            found_inf=self.found_inf,
        )
        mine = self.exchange.collect(cut, pieces)
        matrices = {matrix.index: matrix.matrices for matrix in cut}
        updates = {index: self.orthogonalise(flat.view(matrices[index])).reshape(-1) for index, flat in mine.items()}
        updates = {index: update.to(self.between) for index, update in updates.items()}
        parts = self.exchange.give_back(cut, updates, pieces)
        targets = [getattr(p, "muon_target", None) for p in params]
        self.apply(
            group,
            parts,
            [p.detach() for p in params],
            None if targets[0] is None else targets,
            [matrix.matrices[1:] for matrix in cut],
        )

    def apply(
        self, group: dict, updates: list[Tensor], weights: list[Tensor], targets: list[Tensor] | None, shapes: list
    ) -> None:
        """weights -= ..., scaled for matrices of `shapes`; into `targets` too, where the weights are their fp32 copies."""
        muon_update_(
            updates,
            None if targets is None else weights,
            weights if targets is None else targets,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            scales=[self.muon.rms_scale * math.sqrt(max(shape)) for shape in shapes],
            found_inf=self.found_inf,
        )

    @property
    def between(self) -> torch.dtype:
        """Dtype between momentum and Newton-Schulz: fp16 is for the iterations alone, which keep their range."""
        return torch.float32 if self.muon.dtype == "fp32" else torch.bfloat16

    def orthogonalise(self, batch: Tensor, square_sums: Tensor | None = None) -> Tensor:
        """Newton-Schulz of every matrix of `batch` [b, m, n], in its dtype; square_sums fp32 [b], where they are known already."""
        muon = self.muon
        return newton_schulz(batch, muon.steps, muon.coefficients, dtype=DTYPES[muon.dtype], square_sums=square_sums)

    def initialise_state(self, params: Sequence[Tensor] | None = None) -> None:
        """Zeros for the state of `params`, by default of all, where there is none yet."""
        for p in params if params is not None else [p for group in self.param_groups for p in group["params"]]:
            if self.state[p]:
                continue
            if hasattr(p, "muon_matrices"):
                self.state[p]["exp_avg"] = torch.zeros_like(p, dtype=DTYPES[self.muon.momentum_dtype])
            else:
                self.state[p].update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        # torch casts state to the parameter's dtype.
        for p, state in self.state.items():
            if hasattr(p, "muon_matrices") and "exp_avg" in state:
                state["exp_avg"] = state["exp_avg"].to(DTYPES[self.muon.momentum_dtype])


def _matrices(params: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Each tensor, flat or not, as the matrices that Muon sees of its parameter."""
    return [m for p, t in zip(params, tensors, strict=True) for m in t.detach().view(p.muon_matrices).unbind(0)]


def _rounds(params: Sequence[Tensor], elements: int) -> Iterator[list[Tensor]]:
    """`params` in rounds of at most `elements`, or of one parameter; equal shapes stay together."""
    some, count = [], 0
    for p in sorted(params, key=lambda p: p.muon_matrices[1:]):
        if some and count + p.numel() > elements:
            yield some
            some, count = [], 0
        some.append(p)
        count += p.numel()
    if some:
        yield some
