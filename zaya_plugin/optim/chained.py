# SPDX-License-Identifier: Apache-2.0
"""One optimizer step as few passes over the gradients: one that measures them, and the update, which scales as it reads.

Megatron's ChainedOptimizer.step reads every gradient for its norm, waits for the result on the host, and multiplies all
gradients by the clipping coefficient; without Transformer Engine or apex it does each with launches, and with a wait, for
every parameter. Here norm, coefficient and the decision to skip stay on the device: the update's kernels take them from there,
the whole update is launched, and only then the host waits, for the norm alone, while the device is busy with the update.
So what `step` returns is exact, as any training loop expects, and costs the device nothing.
"""

from __future__ import annotations

import math

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor

from zaya_plugin import compat
from zaya_plugin.optim.gradient_buffers import DeferredScale
from zaya_plugin.optim.host_copy import HostCopy


class NonFiniteGradientsError(RuntimeError):
    """Raised by a step, on all ranks, that has left weights and state as they were."""


class ChainedMuonAdamW(ChainedOptimizer):
    """Megatron's chain of optimizers, each over a MuonAdamW (or over nothing, where a rank has no such parameters).

    Attributes:
        non_finite: leave everything as it is, on all ranks, where any gradient is infinite or not a number; "skip": and go on, "stop": and raise
            NonFiniteGradientsError. None: do not look.
        deferred: what the gradients in DDP's buffers are still to be multiplied by.
    """

    non_finite: str | None = None

    def __init__(self, chained_optimizers: list[MegatronOptimizer]):
        super().__init__(chained_optimizers)
        self._counted: dict[int, tuple[list, list]] = {}
        # A constant, so the loop that asks for it every step need not wait for the device.
        self._loss_scale = torch.ones((), dtype=torch.float32, device="cpu")
        self.defer_scaling([])

    def defer_scaling(self, model_chunks: list) -> None:
        """From now on the step multiplies by what Megatron scales the gradients of `model_chunks` with."""
        chunks = [chunk for chunk in model_chunks if isinstance(chunk, DistributedDataParallel)]
        buffers = [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        self.deferred = DeferredScale(buffers, torch.cuda.current_device())

    def get_loss_scale(self) -> Tensor:
        """Megatron's scale; without one a 1 on the host, which multiplies tensors of any device."""
        scaled = any(getattr(optimizer, "grad_scaler", None) is not None for optimizer in self.chained_optimizers)
        return super().get_loss_scale() if scaled else self._loss_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.deferred.reset()

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """As Megatron's: whether weights were updated, the norm of all gradients, and how many are zero (if asked for).

        What the buffers hold afterwards is used up: torch's fused AdamW leaves its gradients scaled, and Muon as they were.
        """
        self.grad_norms_by_group = {}
        if self.prepare_grads():  # fp16's loss scaling alone finds anything here
            return False, None, None
        square_sum, broken = self._measure()
        norm = square_sum.sqrt() * self.deferred.factor
        report = HostCopy([torch.stack((norm, broken))])
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None

        largest = getattr(self.config, "grad_norm_skip_threshold", math.inf)
        skip = None
        if self.non_finite or math.isfinite(largest):
            skip = ((broken > 0) & (self.non_finite is not None) | (norm > largest)).float()
        scale = (self._clipping(norm) * self.deferred.factor).float()
        inner = [o.optimizer for o in self.chained_optimizers if not getattr(o, "is_stub_optimizer", False)]
        for optimizer in inner:
            optimizer.grad_scale, optimizer.found_inf = scale, skip
        success = self.step_with_ready_grads()
        self.deferred.reset()

        reported, broken = report.read()[0].tolist()
        refused = self.non_finite and broken
        if refused or reported > largest:
            for optimizer in inner:
                optimizer.take_back_step()
            if refused and self.non_finite == "stop":
                raise NonFiniteGradientsError(
                    f"{int(broken)} gradients (of all ranks) hold an infinity or no number. Weights and optimizer state are as before "
                    "this step. optim.non_finite_gradients=skip leaves such steps out and goes on"
                )
            return (False, None, None) if refused else (False, reported, zeros)
        return success, reported, zeros

    def _clipping(self, norm: Tensor) -> Tensor:
        """What clipping multiplies gradients of `norm` by, as clip_grad_by_total_norm_fp32: 1 also where the norm is not a number."""
        if self.config.clip_grad <= 0:
            return torch.ones_like(norm)
        coefficient = self.config.clip_grad / (norm + 1e-6)
        return torch.where(coefficient < 1, coefficient, 1.0)

    def _measure(self) -> Tensor:
        """Over all ranks, fp64 [2]: the sum of squares of all gradients as they lie there, and how many tensors are not finite."""
        together = self.grads_states_parallel_group_is_shared()
        total = torch.zeros(2, dtype=torch.float64, device=self.deferred.factor.device)
        for optimizer in self.chained_optimizers:
            found = self._local_sums(optimizer)
            if not together:
                torch.distributed.all_reduce(found, group=optimizer.get_grad_stats_parallel_group())
            total += found
        if together:
            torch.distributed.all_reduce(total, group=self.get_grad_stats_parallel_group())
        return total

    def _local_sums(self, optimizer: MegatronOptimizer) -> Tensor:
        """`_measure` of what one optimizer holds on this rank. Sums are fp64, so what is finite gives no infinity."""
        counted, others = self._params(optimizer)
        grads = [p.grad for p in (*counted, *others)]
        if not grads:
            return torch.zeros(2, dtype=torch.float64, device=self.deferred.factor.device)
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64))
        return torch.stack((norms[: len(counted)].square().sum(), (~norms.isfinite()).sum(dtype=torch.float64)))

    def _params(self, optimizer: MegatronOptimizer) -> tuple[list, list]:
        """Parameters with a gradient that the norm counts, and those that another rank counts; Megatron is asked once."""
        params = [p for p in optimizer.get_parameters() if p.grad is not None]
        known = self._counted.get(id(optimizer))
        if known is None or len(params) != len(known[0]) + len(known[1]):
            grads = compat.grads_for_norm(optimizer)
            counting = {id(grad) for grad in grads}
            known = ([p for p in params if id(p.grad) in counting], [p for p in params if id(p.grad) not in counting])
            assert len(known[0]) == len(grads)
            self._counted[id(optimizer)] = known
        return known
