# SPDX-License-Identifier: Apache-2.0
"""The optimizer step in two passes over the gradients: one measures them, the other updates and scales as it reads.

Megatron's ChainedOptimizer.step reads every gradient for its norm, waits for the result on the host, and multiplies all
gradients by the clipping coefficient. Without Transformer Engine or apex it launches kernels and waits for every
parameter. In this optimizer norm, coefficient and the decision to skip stay on the device, where the update's kernels
read them. The host launches the whole update and then waits for the norm alone, while the device is busy with the
update. So `step` returns the exact outcome, and the device does not idle.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer, MegatronOptimizer
from torch import Tensor

from zaya_plugin import compat
from zaya_plugin.ground.errors import NotFiniteError, message
from zaya_plugin.optim.muon import StepContext
from zaya_plugin.patches import hooks


class NonFiniteGradientsError(NotFiniteError):
    """Gradients are not finite. A step raises it on all ranks, with weights and state unchanged."""


class ChainedMuonAdamW(ChainedOptimizer):
    """Megatron's chain of optimizers, each over a MuonAdamW, or over None if the rank has no such parameters.

    Args:
        model_chunks: the models whose gradients Megatron scales; the step multiplies by the factor.
        non_finite: what happens on all ranks if any gradient is infinite or NaN. "skip": the step changes nothing.
            "stop": it also raises NonFiniteGradientsError. None: gradients are not checked.
        max_non_finite: with "skip": this number of such steps in a row raises too; None: any number is skipped.

    Attributes:
        deferred: the factor, 1 / number of tokens, by which the gradients in DDP's buffers must still be multiplied.
    """

    def __init__(
        self,
        chained_optimizers: list[MegatronOptimizer],
        model_chunks: Iterable = (),
        non_finite: str | None = None,
        max_non_finite: int | None = None,
    ):
        super().__init__(chained_optimizers)
        self.non_finite, self.max_non_finite = non_finite, max_non_finite
        chunks = [chunk for chunk in model_chunks if isinstance(chunk, DistributedDataParallel)]
        buffers = [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        self.deferred = DeferredScale(buffers, torch.cuda.current_device())
        self._before_change: Callable[[Iterable[Tensor]], None] | None = None
        self._counted: dict[int, tuple[list, list]] = {}
        self._refused_in_a_row = 0
        # On the host, because the loop reads it every step.
        self._loss_scale = torch.ones((), dtype=torch.float32, device="cpu")

    @property
    def parts(self) -> list[MegatronOptimizer]:
        """The optimizers with parameters on this rank."""
        return [part for part in self.chained_optimizers if not getattr(part, "is_stub_optimizer", False)]

    def announce_changes(self, before_change: Callable[[Iterable[Tensor]], None]) -> None:
        """Create all state; from now on each step calls `before_change` with the tensors that it changes next."""
        self._before_change = before_change
        for part in self.parts:
            part.optimizer.initialise_state()

    def get_loss_scale(self) -> Tensor:
        """Return Megatron's loss scale, or a 1 on the host, which multiplies tensors of any device."""
        scaled = any(getattr(optimizer, "grad_scaler", None) is not None for optimizer in self.chained_optimizers)
        return super().get_loss_scale() if scaled else self._loss_scale

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.deferred.reset()

    @torch.no_grad()
    def step(self) -> tuple[bool, float | None, int | None]:
        """Update the weights. Return, as Megatron's: whether they were updated, the norm of all gradients, and the
        number of zeros.

        The number of zeros is None unless log_num_zeros_in_grad is set. Afterwards the buffers must not be read:
        torch's fused AdamW leaves its gradients scaled, and Muon leaves them unscaled.
        """
        self.grad_norms_by_group = {}
        # Sets `grad` of the fp32 weights. True only if fp16's loss scaling has seen a gradient that is not finite.
        if self.prepare_grads():
            return False, None, None
        square_sum, non_finite_count = self._measure()
        norm = square_sum.sqrt() * self.deferred.factor
        host_copy = HostCopy([torch.stack((norm, non_finite_count))])
        zeros = self.count_zeros() if self.config.log_num_zeros_in_grad else None

        skip_threshold = getattr(self.config, "grad_norm_skip_threshold", math.inf)
        skip = None
        if self.non_finite or math.isfinite(skip_threshold):
            skip = ((non_finite_count > 0) & (self.non_finite is not None) | (norm > skip_threshold)).float()
        scale = (self._clipping(norm) * self.deferred.factor).float()
        for part in self.parts:
            # Of a MuonDistributedOptimizer; without shards there are no pieces, and Megatron copies the weights.
            exchange, targets = getattr(part, "exchange", None), getattr(part, "targets", {})
            part.optimizer.begin_step(StepContext(scale, skip, exchange, targets, self._before_change))
        # Megatron's: each inner optimizer's step, the copy of AdamW's weights to the model's dtype, and, unless
        # overlap_param_gather is set, the all-gather.
        success = self.step_with_ready_grads()
        self.deferred.reset()

        reported_norm, non_finite_count = host_copy.read()[0].tolist()
        refused = self.non_finite and non_finite_count
        self._refused_in_a_row = self._refused_in_a_row + 1 if refused else 0
        if refused or reported_norm > skip_threshold:
            for part in self.parts:
                part.optimizer.take_back_step()
            if refused and self.non_finite == "stop":
                raise NonFiniteGradientsError(
                    message(
                        "optim.non_finite_gradients",
                        "stop",
                        problem=f"{int(non_finite_count)} gradients (of all ranks) hold an infinity or NaN. Weights "
                        "and optimizer state are as before this step",
                        fix="optim.non_finite_gradients=skip, which skips such steps and continues",
                    )
                )
            if refused and self._refused_in_a_row == self.max_non_finite:
                raise NonFiniteGradientsError(
                    message(
                        "optim.max_non_finite_steps",
                        self.max_non_finite,
                        problem="the gradients of this number of steps in a row hold an infinity or NaN. Weights and "
                        "optimizer state are as before the first of them",
                        fix="look at the data of these steps; with other weights or a lower optim.lr the same command "
                        "with resume=auto may pass them",
                    )
                )
            return (False, None, None) if refused else (False, reported_norm, zeros)
        return success, reported_norm, zeros

    def _clipping(self, norm: Tensor) -> Tensor:
        """Return the clipping coefficient for gradients of `norm`, as clip_grad_by_total_norm_fp32 does: 1 if the norm
        is NaN.
        """
        if self.config.clip_grad <= 0:
            return torch.ones_like(norm)
        coefficient = self.config.clip_grad / (norm + 1e-6)
        return torch.where(coefficient < 1, coefficient, 1.0)

    def _measure(self) -> Tensor:
        """Return, over all ranks, fp64 [2]: the sum of squares of all unscaled gradients, and the number of tensors
        that are not finite.
        """
        shares_one_group = self.grads_states_parallel_group_is_shared()
        total = torch.zeros(2, dtype=torch.float64, device=self.deferred.factor.device)
        for optimizer in self.chained_optimizers:
            sums = self._local_sums(optimizer)
            if not shares_one_group:
                torch.distributed.all_reduce(sums, group=optimizer.get_grad_stats_parallel_group())
            total += sums
        if shares_one_group:
            torch.distributed.all_reduce(total, group=self.get_grad_stats_parallel_group())
        return total

    def _local_sums(self, optimizer: MegatronOptimizer) -> Tensor:
        """Return the two numbers of `_measure` for one optimizer on this rank. Sums are fp64, so finite gradients give
        no infinity.
        """
        counted, others = self._params(optimizer)
        grads = [p.grad for p in (*counted, *others)]
        if not grads:
            return torch.zeros(2, dtype=torch.float64, device=self.deferred.factor.device)
        norms = torch.stack(torch._foreach_norm(grads, 2, dtype=torch.float64))
        return torch.stack((norms[: len(counted)].square().sum(), (~norms.isfinite()).sum(dtype=torch.float64)))

    def _params(self, optimizer: MegatronOptimizer) -> tuple[list, list]:
        """Return the parameters whose gradients the norm counts, and those that another rank counts. Megatron's answer
        is cached.
        """
        params = [p for p in optimizer.get_parameters() if p.grad is not None]
        cached = self._counted.get(id(optimizer))
        if cached is None or len(params) != len(cached[0]) + len(cached[1]):
            grads = compat.grads_for_norm(optimizer)
            counting = {id(grad) for grad in grads}
            cached = ([p for p in params if id(p.grad) in counting], [p for p in params if id(p.grad) not in counting])
            assert len(cached[0]) == len(grads)
            self._counted[id(optimizer)] = cached
        return cached


class DeferredScale:
    """Replacement of `scale_gradients` of DDP's gradient buffers: it stores the factor, and the optimizer multiplies by
    it.

    factor: fp32 scalar on the device, 1 after `reset`. `ChainedMuonAdamW.step` multiplies it into `StepContext.scale`.
        No call reads it on the host, so it works inside a CUDA graph too.

    Megatron's finalize_model_grads multiplies the whole of every gradient buffer by 1 / num_tokens in a pass of its
    own. With ZeRO-1 over N ranks that is N times what a rank reads.
    """

    def __init__(self, buffers: Iterable, device: torch.device | str):
        self.factor = torch.ones((), dtype=torch.float32, device=device)
        # During one call of finalize_model_grads: the buffers that it has scaled, and by which number.
        self._scaled: set[int] = set()
        self._by: Tensor | float | None = None
        self._buffers = list(buffers)
        for i, buffer in enumerate(self._buffers):
            hooks.set_attribute("_ParamAndGradBuffer().scale_gradients", buffer, functools.partial(self.scale, i))

    def scale(self, index: int, scaling_factor: Tensor | float) -> None:
        """Note that buffer `index` is to be scaled. Megatron scales all buffers by the same number, one after
        another.
        """
        if not self._scaled:
            self._by = scaling_factor
            self.factor.mul_(scaling_factor.reshape(()) if isinstance(scaling_factor, Tensor) else scaling_factor)
        assert self._by is scaling_factor and index not in self._scaled, (
            "all gradient buffers are scaled by one number, each once"
        )
        self._scaled.add(index)
        if len(self._scaled) == len(self._buffers):
            self._scaled.clear()
            self._by = None

    def reset(self) -> None:
        """Set the factor to 1, because the buffers were zeroed or the optimizer has multiplied by the factor."""
        self.factor.fill_(1.0)
        self._scaled.clear()


class HostCopy:
    """Copies of `tensors` in host memory, complete once the device has done the work launched before; the host
    continues to launch work meanwhile.

    Only `read` waits. Later work of the same stream may overwrite the sources. On the CPU the copies are complete at
    once.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        # From a device, torch copies to pinned memory.
        self._copies = [t.detach().to("cpu", non_blocking=True, copy=True) for t in tensors]
        self._event = None
        if any(t.is_cuda for t in tensors):
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_complete(self) -> bool:
        """Whether `read` would return at once. False during the capture of a CUDA graph, when events must not be
        queried.
        """
        if self._event is None:
            return True
        return not torch.cuda.is_current_stream_capturing() and self._event.query()

    def read(self) -> list[Tensor]:
        """Return the tensors on the host. It waits for this copy, not for work launched after it."""
        if not self.is_complete:
            self._event.synchronize()
        return self._copies
