# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (arXiv 2106.09685): y = x W^T + alpha / rank * (x A^T) B^T, where W is frozen.

The adapter's product is computed apart from the base's and added to its result. No effective weight W + alpha / rank * B A
is made: in bf16 it would round small updates away. The base's matrix products compute no weight gradients. The kernels
between them compute the gradients of their vectors and convolutions in any case; these are dropped.

Names and shapes: transformers' ZAYA under peft 0.21, but for the experts (zaya_plugin/checkpoint/convert/adapters.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import hip_ops
from hip_ops.runtime.main_grad import handed_over, main_grad_linear, main_grad_of
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.parameters import constant_parameter, gathered, random_parameter

ADAPTER = ".adapters."  # in the name of each parameter of an adapter
ROUTER_MATRICES = tuple(f".mlp.router.{name}." for name in ("down_proj", "fc1", "fc2", "out_proj"))


class LowRank(nn.Module):
    """The adapter of a matrix [out, in]: lora_A [r, in], uniform as in peft, and lora_B [out, r], zeros.

    experts: the global indices of this rank's experts; lora_A is then [experts, r, in] and lora_B [experts, out, r]. No
    matrix of them has to be whole for the optimizer, which is AdamW, so all experts are one parameter. With
    lora_experts="shared" it is [1, ..] of all experts on all ranks. Its gradients are summed over data-parallel ranks as
    those of other replicated weights: each rank adds the rows of its own experts.
    """

    def __init__(self, config: ZayaConfig, output_size: int, input_size: int, experts: range | None = None):
        super().__init__()
        own = experts is not None and config.lora_experts == "each"
        stack = () if experts is None else (config.num_moe_experts if own else 1,)
        bound = input_size**-0.5
        self.lora_A = random_parameter(
            config, (*stack, config.lora_rank, input_size), lambda tensor: tensor.uniform_(-bound, bound)
        )
        self.lora_B = constant_parameter(config, (*stack, output_size, config.lora_rank), 0.0)
        if own:  # every rank draws all of them, so that they do not depend on the layout
            for name in ("lora_A", "lora_B"):
                local = nn.Parameter(self._parameters[name][experts.start : experts.stop].detach().clone())
                local.allreduce = False  # as of the experts' own matrices
                self._parameters[name] = local


def adapters(config: ZayaConfig, target: str, sizes: dict[str, tuple[int, int]], experts: range | None = None):
    """Return the adapters of the matrices of `target` by name, sizes: (out, in); None if it is no target."""
    is_target = config.lora_rank is not None and target in config.lora_targets
    return nn.ModuleDict({n: LowRank(config, *size, experts) for n, size in sizes.items()}) if is_target else None


def scaling(config: ZayaConfig) -> float:
    """Return alpha / rank."""
    return config.lora_alpha / config.lora_rank


def low_rank_linear(config: ZayaConfig, x: Tensor, layers: Sequence[LowRank]) -> Tensor:
    """Return what the adapters of matrices that are applied to x as one product add to it: x [..., in] -> [..., sum of
    out].
    """
    low = main_grad_linear(x, *(gathered(layer).lora_A for layer in layers)) * scaling(config)
    parts = low.split(config.lora_rank, dim=-1)
    return torch.cat([main_grad_linear(part, layer.lora_B) for part, layer in zip(parts, layers, strict=True)], dim=-1)


def add_low_rank_rows_(out: Tensor, x: Tensor, first: Tensor, second: Tensor, scale: float, offsets: Tensor) -> Tensor:
    """Add (scale x first_e) second_e to the rows of every expert in place; return scale x first_e [T, r].

    x [T, k] sorted by expert, first [E, k, r], second [E, r, n], out [T, n]. offsets [E] and padding rows: as in
    `hip_ops.grouped_rows`. E = 1 with the last offset: a shared adapter.
    """
    low = hip_ops.grouped_rows(x, first, offsets).mul_(scale)
    out.add_(hip_ops.grouped_rows(low, second, offsets))
    return low


def expert_gradient(stack: Tensor, a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Add a_e^T b_e to the main gradient of `stack` [E, m, n], a parameter; return the value for its backward function
    to return.
    """
    total = main_grad_of(stack)
    if total is None:
        return hip_ops.grouped_outer_(torch.empty_like(stack), a, b, offsets, False)
    hip_ops.grouped_outer_(total, a, b, offsets)
    return handed_over(stack)


def is_trained(config: ZayaConfig, name: str) -> bool:
    """Return whether the parameter or buffer `name` of a model changes in training, and is stored in its checkpoints."""
    return (
        ADAPTER in name
        or "router" in config.lora_targets
        and any(matrix in name for matrix in ROUTER_MATRICES)
        or config.lora_balancing
        and ".balancing_" in name
    )
