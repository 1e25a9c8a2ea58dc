# SPDX-License-Identifier: Apache-2.0
"""Muon for matrices and AdamW for all other parameters in one torch optimizer, which Megatron wraps as it wraps its
Adam.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) orthogonalises the momentum by Newton-Schulz; the
update is scaled to AdamW's root mean square, 0.2 * sqrt(max(m, n)) (Liu et al. 2025, arXiv 2502.16982, section 2.2), so
that both share one learning rate and one weight decay. ZAYA1 was trained with this form of Muon (arXiv 2605.05365,
section III).

A parameter may be flat, as Megatron's distributed optimizer keeps its share: its role (parameter_role.py) has the shape
of its matrices. In one round (`MuonSettings.elements_at_once`), matrices of one shape, of all layers and experts, go
through Newton-Schulz in one batch.

The path of a matrix's gradient to its new weight under the distributed optimizer, in order:

    model/experts.py            `weight_gradients`: experts, one product for all matrices of a block
      hip_ops.grouped_outer_    writes the products to the block's main gradients, or adds them (`ExpertBlock`)
    hip_ops.runtime.main_grad   `add_product(s_)`: all other matrices, added to `main_grad`. `handed_over` and, for
                                experts, `handed_over_block` set DDP's `grad_added_to_main_grad`
    Megatron's DDP              reduce-scatter of a bucket group. gradient_buffers.py joins the groups of a layer's
                                experts; chained.py's `DeferredScale` replaces the division by the number of tokens
    chained.py                  `step`, in which all lines up to the next of DDP run
    sharding/distributed.py     `_copy_model_grads_to_main_grads`: this rank's part becomes `grad` of its fp32 weight
    chained.py                  `_measure`: norm, clipping coefficient and decision to skip become a `StepContext`
    muon.py                     by Megatron's `step_with_ready_grads`: `MuonAdamW.update`: whole matrices in rounds
                                (`update_matrices`), cut ones together (`update_pieces`)
      hip_ops.MatrixBatches     batches of matrices of one shape
      hip_ops.muon_momentum_    multiplies the gradient by the scale and updates the momentum
      hip_ops.newton_schulz     orthogonalises a batch
      hip_ops.muon_update_      writes the fp32 weight and this rank's part of DDP's parameter buffer
    Megatron's DDP              all-gather of the parameter buffer. The forward pass waits for it: experts by the hook
                                of `GroupedWeight` (model/experts.py), modules that are not called by `gathered`
                                (model/parameters.py)

The owner of a matrix is planned before, when DDP lays out its buffers, by sharding/placement.py. Where a layout cuts a
matrix between ranks, `MatrixExchange` of sharding/distributed.py collects it at its owner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from hip_ops import muon_momentum_, muon_update_, newton_schulz
from hip_ops.ops.muon import MatrixBatches
from zaya_plugin.ground.errors import mistake
from zaya_plugin.optim.parameter_role import role_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class MuonSettings:
    """Muon's own settings; learning rate and weight decay come from the parameter groups.

    momentum: of the moving average b = lerp(b, g, 1 - momentum).
    nesterov: orthogonalise lerp(g, b, momentum) instead of b.
    steps, coefficients, dtype: Newton-Schulz iterations, their coefficient set (names of hip_ops.newton_schulz) and
        the dtype they run in, "bf16", "fp16" or "fp32"; batches and results stay bf16 with the first two.
    rms_scale: the update is scaled by rms_scale * sqrt(max(m, n)).
    momentum_dtype: dtype of the stored momentum, "fp32" or "bf16".
    elements_at_once: largest number of elements updated in one round, which bounds the memory of a step.
    """

    momentum: float = 0.95
    nesterov: bool = True
    steps: int = 5
    coefficients: str = "simple"
    dtype: str = "bf16"
    rms_scale: float = 0.2
    momentum_dtype: str = "fp32"
    elements_at_once: int = 2**27


class PieceExchange(Protocol):
    """Exchange of matrices that several ranks share (`zaya_plugin.optim.sharding.distributed.MatrixExchange`).

    cut: fp32 weight of which this rank has only a piece -> an object with the `index` of the whole parameter, equal on
        all ranks (`CutMatrix`).
    """

    cut: Mapping[Tensor, object]

    def collect(self, params: Sequence[Tensor], pieces: Sequence[Tensor]) -> dict[int, Tensor]:
        """Send `pieces` to the owners; return the parameters that this rank owns, flat and whole, by index."""

    def give_back(self, params: Sequence[Tensor], whole: dict[int, Tensor], like: Sequence[Tensor]) -> list[Tensor]:
        """Send the owners' `whole` parameters back in pieces; return this rank's piece of each of `params`."""


@dataclass(frozen=True)
class StepContext:
    """All that one step needs besides parameters, gradients and state; `ChainedMuonAdamW.step` makes it.

    scale: None, or an fp32 scalar on the parameters' device; every gradient is multiplied by it when it is read. It is
        the clipping coefficient times `DeferredScale.factor` (1 / number of tokens).
    skip: None, or an fp32 scalar on that device; unless it is 0, the step changes no tensor. On a GPU the kernels check
        it, so the step is counted in `param_groups`, and `take_back_step` must be called.
    exchange: collects the matrices of which this rank has only a piece (the parameters in `exchange.cut`).
    targets: fp32 weight under Muon -> this rank's flat part of the same weight in DDP's parameter buffer, in the
        model's dtype; both get the new value.
    before_change: called with parameters and state before the kernels that change them are launched.
    """

    scale: Tensor | None = None
    skip: Tensor | None = None
    exchange: PieceExchange | None = None
    targets: Mapping[Tensor, Tensor] = field(default_factory=dict)
    before_change: Callable[[Iterable[Tensor]], None] | None = None


class GroupStepAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101): torch's arithmetic, with the step count in the parameter group.

    Megatron's DistributedOptimizer saves and loads one `step` a parameter group, as apex and Transformer Engine keep
    it. torch.optim.AdamW keeps one a parameter; its checkpoint does not load (an assertion in distrib_optimizer.py) or
    comes back with a wrong step.

    Args:
        params: tensors or parameter groups; the state has each tensor's shape and dtype.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; the decay is decoupled.
        adam_w_mode: must be True, else ValueError. Megatron passes it to apex's and Transformer Engine's Adam.
        capturable: must be False, else ValueError. Megatron passes it too.
    """

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True, capturable=False
    ):
        if not adam_w_mode:
            raise mistake(
                "adam_w_mode",
                False,
                problem="only decoupled weight decay is implemented",
                allowed="true",
                fix="decoupled_weight_decay=True in Megatron's OptimizerConfig",
            )
        if capturable:
            raise mistake(
                "capturable",
                True,
                problem="the step count is kept on the host, so the optimizer cannot be part of a graph",
                allowed="false",
                fix="optimizer_cuda_graph=False in Megatron's OptimizerConfig",
            )
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self._stepped: list[dict] = []
        self._context = StepContext()

    def begin_step(self, context: StepContext) -> None:
        """Give the next `step` its context; Megatron calls that without arguments."""
        self._context = context

    @torch.no_grad()
    def step(self, closure=None):
        """Update every parameter that has a gradient. The context of `begin_step` is used once."""
        assert closure is None, "closures are not supported"
        context, self._context = self._context, StepContext()
        self._stepped = []
        if context.skip is not None and not context.skip.is_cuda and context.skip.item():
            return
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                group["step"] = group.get("step", 0) + 1
                self._stepped.append(group)
                self.update(context, group, params)

    def take_back_step(self) -> None:
        """Uncount the last `step`, which changed nothing."""
        for group in self._stepped:
            group["step"] -= 1
        self._stepped = []

    def initialise_state(self, params: Sequence[Tensor] | None = None) -> None:
        """Set the missing state of `params`, by default of all parameters, to zeros."""
        for p in params if params is not None else [p for group in self.param_groups for p in group["params"]]:
            if not self.state[p]:
                self.state[p].update(self.zero_state(p))

    def load_state_dict(self, state_dict: dict) -> None:
        """Load the state. Of the saved groups only the step counts, which all groups have in common; a resumed run may
        have other learning rates, betas and multipliers, and so other groups.
        """
        super().load_state_dict({**state_dict, "param_groups": self.groups_after(state_dict["param_groups"])})

    def groups_after(self, saved: list[dict]) -> list[dict]:
        """Return this run's groups, as state_dict() describes them, with the step of the `saved` ones."""
        step = max((group.get("step", 0) for group in saved), default=0)
        return [{**group, "step": step} for group in self.state_dict()["param_groups"]]

    def _announce(self, context: StepContext, params: Sequence[Tensor]) -> None:
        """Create missing state, and announce the change of `params` and their state."""
        self.initialise_state(params)
        if context.before_change is not None:
            context.before_change(tensor for p in params for tensor in (p, *self.state[p].values()))

    def zero_state(self, p: Tensor) -> dict[str, Tensor]:
        """Return the state of `p` before the first step."""
        return {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    def update(self, context: StepContext, group: dict, params: list[Tensor]) -> None:
        """Update `params` by AdamW with the settings of `group`, whose `step` counts this update already."""
        self._announce(context, params)
        # One kernel for all parameters on a GPU. foreach would make a second copy of the state for the square roots.
        fused = all(p.is_cuda for p in params)
        # torch adds 1 to these before use; fused requires them on the device.
        steps = torch.full((len(params),), group["step"] - 1.0, device=params[0].device if fused else "cpu").unbind()
        grads = [p.grad for p in params]
        scaling = {}
        if fused:  # the fused kernel divides by its grad_scale
            divisor = None if context.scale is None else context.scale.reciprocal()
            scaling = dict(grad_scale=divisor, found_inf=context.skip)
        elif context.scale is not None:
            grads = torch._foreach_mul(grads, context.scale)
        adamw(
            params,
            grads,
            [self.state[p]["exp_avg"] for p in params],
            [self.state[p]["exp_avg_sq"] for p in params],
            [],
            list(steps),
            foreach=not fused,
            fused=fused,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            **scaling,
        )


class MuonAdamW(GroupStepAdamW):
    """Muon on parameters whose role has `matrices`, torch's AdamW on all others.

    State: `exp_avg`, the momentum, for Muon; `exp_avg` and `exp_avg_sq` for AdamW.
    """

    def __init__(self, params, muon: MuonSettings | None = None, **adam):
        self.muon = muon or MuonSettings()
        super().__init__(params, **adam)

    def update(self, context: StepContext, group: dict, params: list[Tensor]) -> None:
        """Update `params` of one group: AdamW, then whole matrices in rounds, then pieces of matrices."""
        cut = context.exchange.cut if context.exchange is not None else {}
        whole_params, cut_params, adamw_params = [], [], []
        for p in params:
            (adamw_params if role_of(p).matrices is None else cut_params if p in cut else whole_params).append(p)
        if adamw_params:
            super().update(context, group, adamw_params)
        for round_params in _rounds(whole_params, self.muon.elements_at_once):
            self.update_matrices(context, group, round_params)
        if cut_params:
            self.update_pieces(context, group, cut_params)

    def update_matrices(self, context: StepContext, group: dict, params: Sequence[Tensor]) -> None:
        """Update `params`, whole matrices, in one round: momentum, Newton-Schulz by shape, weights."""
        muon = self.muon
        self._announce(context, params)
        shapes = [(m, n) for b, m, n in map(_shape, params) for _ in range(b)]
        batches = MatrixBatches(shapes, params[0].device, self.update_dtype)
        muon_momentum_(
            _matrices(params, [p.grad for p in params]),
            _matrices(params, [self.state[p]["exp_avg"] for p in params]),
            batches.slots,
            momentum=muon.momentum,
            nesterov=muon.nesterov,
            grad_scale=context.scale,
            found_inf=context.skip,
            # Newton-Schulz divides by the norms, and then does not read the matrices for them
            square_sums=batches.square_sums,
        )
        updates = batches.split(
            [self.orthogonalise(*pair) for pair in zip(batches.tensors, batches.sums(), strict=True)]
        )
        targets = _targets(context, params)
        weights = _matrices(params, params)
        self.apply(context, group, updates, weights, None if targets is None else _matrices(params, targets), shapes)

    def update_pieces(self, context: StepContext, group: dict, params: Sequence[Tensor]) -> None:
        """Update `params`, of which this rank has pieces: as `update_matrices`, with an exchange before and after
        Newton-Schulz.
        """
        self._announce(context, params)
        # The momentum is computed element by element, so each rank updates its own piece before the exchange.
        momentum_pieces = [torch.empty_like(p, dtype=self.update_dtype) for p in params]
        muon_momentum_(
            [p.grad for p in params],
            [self.state[p]["exp_avg"] for p in params],
            momentum_pieces,
            momentum=self.muon.momentum,
            nesterov=self.muon.nesterov,
            grad_scale=context.scale,
            found_inf=context.skip,
        )
        # Whole parameters, by index, on their owners only; a parameter may hold several matrices.
        owned_momenta = context.exchange.collect(params, momentum_pieces)
        shapes_by_index = {context.exchange.cut[p].index: _shape(p) for p in params}
        owned_updates = {
            index: self.orthogonalise(flat.view(shapes_by_index[index])).reshape(-1)
            for index, flat in owned_momenta.items()
        }
        owned_updates = {index: update.to(self.update_dtype) for index, update in owned_updates.items()}
        update_pieces = context.exchange.give_back(params, owned_updates, momentum_pieces)
        shapes = [_shape(p)[1:] for p in params]
        self.apply(context, group, update_pieces, [p.detach() for p in params], _targets(context, params), shapes)

    def apply(
        self,
        context: StepContext,
        group: dict,
        updates: list[Tensor],
        weights: list[Tensor],
        targets: list[Tensor] | None,
        shapes: list,
    ) -> None:
        """Decay `weights` and subtract the scaled `updates`, one entry a matrix or piece.

        targets: tensors of the model's dtype that also get the new values. None: only `weights` are written.
        """
        muon_update_(
            updates,
            None if targets is None else weights,
            weights if targets is None else targets,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            scales=[self.muon.rms_scale * math.sqrt(max(shape)) for shape in shapes],
            found_inf=context.skip,
        )

    @property
    def update_dtype(self) -> torch.dtype:
        """The dtype of Newton-Schulz's input and result. With dtype="fp16" both are bf16: only the iteration scales
        its matrices into fp16's range.
        """
        return torch.float32 if self.muon.dtype == "fp32" else torch.bfloat16

    def orthogonalise(self, batch: Tensor, square_sums: Tensor | None = None) -> Tensor:
        """Orthogonalise every matrix of `batch` [b, m, n]. square_sums: of the matrices, fp32 [b], if they are
        known.
        """
        muon = self.muon
        return newton_schulz(batch, muon.steps, muon.coefficients, dtype=DTYPES[muon.dtype], square_sums=square_sums)

    def zero_state(self, p: Tensor) -> dict[str, Tensor]:
        if role_of(p).matrices is None:
            return super().zero_state(p)
        return {"exp_avg": torch.zeros_like(p, dtype=DTYPES[self.muon.momentum_dtype])}

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        # torch casts state to the parameter's dtype.
        for p, state in self.state.items():
            if role_of(p).matrices is not None and "exp_avg" in state:
                state["exp_avg"] = state["exp_avg"].to(DTYPES[self.muon.momentum_dtype])


def _matrices(params: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the matrices of every tensor, which is flat or not; their shapes are those of `params`."""
    return [m for p, t in zip(params, tensors, strict=True) for m in t.detach().view(_shape(p)).unbind(0)]


def _targets(context: StepContext, params: Sequence[Tensor]) -> list[Tensor] | None:
    """Return the tensors of `StepContext.targets` for `params`, or None if there are none: in an fp32
    model, or without the distributed optimizer.
    """
    targets = [context.targets[p] for p in params if p in context.targets]
    assert len(targets) in (0, len(params)), "all parameters of a buffer have one dtype"
    return targets or None


def _shape(parameter: Tensor) -> tuple[int, int, int]:
    """Return (b, m, n) of a Muon parameter's matrices."""
    return role_of(parameter).matrices


def _rounds(params: Sequence[Tensor], elements: int) -> Iterator[list[Tensor]]:
    """Yield rounds of `params` of at most `elements`, or of one larger parameter; sorted, so that equal shapes are
    adjacent.
    """
    round_params, elements_in_round = [], 0
    for p in sorted(params, key=lambda p: _shape(p)[1:]):
        if round_params and elements_in_round + p.numel() > elements:
            yield round_params
            round_params, elements_in_round = [], 0
        round_params.append(p)
        elements_in_round += p.numel()
    if round_params:
        yield round_params
