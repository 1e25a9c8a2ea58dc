# SPDX-License-Identifier: Apache-2.0
"""Expert-bias balancing: AdamW on (load fraction - 1/E), from the choices of the whole global batch.

Source of the rule: ZAYA1-8B Technical Report (arXiv 2605.05365) section II-A-2, eq. 5. Step size, betas and decay are
unpublished; the defaults are this project's. The skip class's bias stays at its initial value, -1: the released
weights have exactly this value after training, so it was not updated.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class RouterStatistics:
    """Counts and entropies of the routers over one global batch.

    `load` and the figures made of it are shares of the tokens that reach an expert. The balancing rule divides by all
    tokens, those of the skip class too.

    tokens_per_expert: int64 [layers, E + 1], the skip class last; every layer of ZAYA has a router.
    entropy: float32 [layers], mean entropy of the router's softmax in nats.
    """

    tokens_per_expert: torch.Tensor
    entropy: torch.Tensor

    @property
    def load(self) -> torch.Tensor:
        """Share of the expert-bound tokens of each expert, float32 [layers, E]."""
        counts = self.tokens_per_expert[:, :-1].float()
        return counts / counts.sum(-1, keepdim=True).clamp_min(1)

    @property
    def load_entropy(self) -> torch.Tensor:
        """Entropy of the load over ln E, float32 [layers]: 1 is perfectly even (report, figure 4)."""
        load = self.load
        return -(load * load.clamp_min(1e-30).log()).sum(-1) / torch.log(torch.tensor(float(load.shape[-1])))

    @property
    def imbalance(self) -> torch.Tensor:
        """Most loaded expert's tokens over the mean, float32 [layers]: 1 is perfectly even, E is collapse."""
        return self.load.amax(-1) * self.load.shape[-1]


@torch.no_grad()
def update_biases(routers, config, group) -> RouterStatistics:
    """Sum the routers' counts over `group`, update every balancing bias, and reset the counts.

    Call it once a step on every rank, after the backward passes of all micro-batches.

    Args:
        routers: ZayaRouter modules of this rank, in layer order; every pipeline stage has at least one.
        config: ZayaConfig with the balancing_* fields.
        group: data- and context-parallel process group over which the batch is spread.

    Returns:
        The global batch's statistics.
    """
    counts = torch.stack([r.tokens_per_expert for r in routers])
    entropy = torch.stack([r.router_entropy_sum for r in routers]).double()
    packed = torch.cat([counts.double(), entropy.reshape(-1, 1)], dim=1)  # exact up to 2^53 tokens
    torch.distributed.all_reduce(packed, group=group)
    counts, entropy = packed[:, :-1].to(torch.int64), packed[:, -1]
    tokens = counts.sum(-1)

    num_experts = counts.shape[1] - 1
    gradient = (counts[:, :num_experts].double() / tokens.clamp_min(1).unsqueeze(-1) - 1 / num_experts).float()
    if config.lora_rank is None or config.lora_balancing:
        _adamw_step(routers, gradient, config)
    for router in routers:
        router.reset_counts()
    return RouterStatistics(counts, (entropy / tokens.clamp_min(1)).float())


def _adamw_step(routers, gradient: torch.Tensor, config) -> None:
    """AdamW without decay on the experts' biases of all layers at once; gradient float32 [layers, E]."""
    num_experts = gradient.shape[1]
    bias = torch.stack([r.balancing_biases[:num_experts] for r in routers])
    exp_avg = torch.stack([r.balancing_exp_avg[:num_experts] for r in routers])
    exp_avg_sq = torch.stack([r.balancing_exp_avg_sq[:num_experts] for r in routers])
    step = torch.stack([r.balancing_step for r in routers]).add(1).double().unsqueeze(-1)

    beta1, beta2 = config.balancing_beta1, config.balancing_beta2
    exp_avg.lerp_(gradient, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    mean = exp_avg / (1 - beta1**step).float()
    scale = (exp_avg_sq / (1 - beta2**step).float()).sqrt() + config.balancing_eps
    bias -= config.balancing_lr * mean / scale
    if config.balancing_centering:
        bias -= bias.mean(-1, keepdim=True)

    for i, router in enumerate(routers):
        router.balancing_biases[:num_experts] = bias[i]
        router.balancing_exp_avg[:num_experts] = exp_avg[i]
        router.balancing_exp_avg_sq[:num_experts] = exp_avg_sq[i]
        router.balancing_step += 1


@functools.cache
def _rows_of(layer_numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the rows of the layers as a tensor on the device. It is cached, because a copy to the device in every step
    would wait.
    """
    return torch.tensor(layer_numbers, device=device) - 1


def over_pipeline_stages(
    statistics: RouterStatistics, layer_numbers: Sequence[int], num_layers: int, group
) -> RouterStatistics:
    """Return the statistics of all layers, in the order of the model, from those of each pipeline stage's own layers.

    Args:
        statistics: of this stage, rows in the order of `layer_numbers`.
        layer_numbers: from 1, over the whole model.
        num_layers: of the whole model.
        group: pipeline-parallel process group; all its ranks must call.
    """
    counts = statistics.tokens_per_expert
    # exact to 2^53 tokens
    rows = torch.zeros(num_layers, counts.shape[1] + 1, dtype=torch.float64, device=counts.device)
    rows[_rows_of(tuple(layer_numbers), counts.device)] = torch.cat(
        (counts.double(), statistics.entropy.double().unsqueeze(-1)), dim=1
    )
    torch.distributed.all_reduce(rows, group=group)
    return RouterStatistics(rows[:, :-1].to(torch.int64), rows[:, -1].float())
