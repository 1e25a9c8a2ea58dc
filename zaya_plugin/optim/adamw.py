# SPDX-License-Identifier: Apache-2.0
"""AdamW for hosts without Transformer Engine or apex: torch's arithmetic, with the step count in the parameter group.

Megatron's DistributedOptimizer saves and loads one `step` a parameter group, as apex and Transformer Engine keep it.
torch.optim.AdamW keeps one a parameter; with it a checkpoint cannot be loaded (distrib_optimizer.py asserts) or comes
back with a wrong step.
"""

from __future__ import annotations

import torch
from torch.optim.adamw import adamw


class GroupStepAdamW(torch.optim.Optimizer):
    """AdamW (arXiv 1711.05101) whose update is torch.optim's own and whose `step` lies in `param_groups`.

    Args:
        params: tensors or parameter groups; the state has each tensor's shape and dtype.
        lr, betas, eps, weight_decay: as in torch.optim.AdamW; the decay is decoupled.
        adam_w_mode, capturable: as Megatron passes them to apex's and Transformer Engine's; only True and False are
            possible, else ValueError.

    Attributes:
        grad_scale: None, or an fp32 scalar on the parameters' device that every gradient is multiplied by as it is read.
        found_inf: None, or an fp32 scalar there; unless it is 0, `step` changes no tensor. On a GPU it is the kernels that
            find out, and the count in `param_groups` goes on until `take_back_step` is called.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(
        self, params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True, capturable=False
    ):
        if not adam_w_mode:
            raise ValueError(
                "adam_w_mode=False: only decoupled weight decay is implemented; set decoupled_weight_decay"
            )
        if capturable:
            raise ValueError(
                "capturable=True (optimizer_cuda_graph): the step count is kept on the host; switch it off"
            )
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))
        self._stepped: list[dict] = []

    @torch.no_grad()
    def step(self, closure=None):
        """One update of every parameter that has a gradient; `closure` is not used."""
        assert closure is None, "closures are not supported"
        self._stepped = []
        if self.found_inf is not None and not self.found_inf.is_cuda and self.found_inf.item():
            return
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                group["step"] = group.get("step", 0) + 1
                self._stepped.append(group)
                self.update(group, params)

    def take_back_step(self) -> None:
        """The last `step` turned out to be skipped: it does not count."""
        for group in self._stepped:
            group["step"] -= 1
        self._stepped = []

    def update(self, group: dict, params: list[torch.Tensor]) -> None:
        """AdamW of `params` with the settings of `group`, whose `step` counts this update already."""
        for p in params:
            if not self.state[p]:
                self.state[p]["exp_avg"] = torch.zeros_like(p)
                self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
        # One kernel for everything on a GPU: no second copy of the state, as foreach needs one for the square roots.
        fused = all(p.is_cuda for p in params)
        # torch counts these up itself before use; fused wants them on the device.
        steps = torch.full((len(params),), group["step"] - 1.0, device=params[0].device if fused else "cpu").unbind()
        grads = [p.grad for p in params]
        scaling = {}
        if fused:  # it divides
            scaling = dict(
                grad_scale=None if self.grad_scale is None else self.grad_scale.reciprocal(), found_inf=self.found_inf
            )
        elif self.grad_scale is not None:
            grads = torch._foreach_mul(grads, self.grad_scale)
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
