# SPDX-License-Identifier: Apache-2.0
"""ZAYA1's router: a small MLP on a latent state that runs through all layers, top-1, balanced by biases.

Source: arXiv 2605.05365 section II-A-2, transformers `ZayaRouter`. Unusual: the state r_l = W h + b + gamma * r_{l-1}
is handed from layer to layer before its norm (exponential depth averaging); one class more than there are experts may
be scored, whose tokens skip the MoE; the routing weight is the probability as it is, neither renormalised nor biased.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.float32_buffers import Float32BuffersMixin
from zaya_plugin.model.fused_router import RouterMLP, count
from zaya_plugin.model.fusion import fused_on_accelerator
from zaya_plugin.model.initialization import constant_parameter, initial_device, random_parameter
from zaya_plugin.model.main_grad import main_grad_linear
from zaya_plugin.model.norm import rms_norm
from zaya_plugin.model.parameter_gather import gathered
from zaya_plugin.model.shared_input import input_and_linear


@fused_on_accelerator
def router_logits(
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
    eps: float,
) -> tuple[Tensor, Tensor]:
    """r = W_d x + b_d + gamma * r_previous, and the three-layer MLP on its norm (arXiv 2605.05365, equations 2-4).

    Args: projected [s, b, r], which is W_d x; previous and gamma, the averaging's operands, or None. Returns r [s, b, r] and
    logits [s, b, classes].
    """
    state = projected + b_down
    if gamma is not None:
        state = torch.addcmul(state, previous, gamma)
    hidden = F.gelu(F.linear(rms_norm(state, w_norm, eps), w1, b1))
    return state, F.linear(F.gelu(F.linear(hidden, w2, b2)), w_out)


@fused_on_accelerator
def choose_expert(
    logits: Tensor, biases: Tensor, *, softmax_in_fp32: bool, forced_expert_ids: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Top-1 choice by biased probability, weight by unbiased probability.

    Args: logits [..., classes]; biases fp32 [classes]; forced_expert_ids int64 [...] takes the place of the choice
    where it is not negative. Returns probabilities [..., classes], weights [...] and class ids int64 [...]; the first
    two in fp32 (or wider) if softmax_in_fp32 else in logits' dtype.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32) if softmax_in_fp32 else logits.dtype
    probabilities = torch.softmax(logits, dim=-1, dtype=dtype)
    ids = (probabilities.detach().to(torch.promote_types(dtype, torch.float32)) + biases).argmax(dim=-1)
    if forced_expert_ids is not None:
        ids = torch.where(forced_expert_ids >= 0, forced_expert_ids, ids)
    weights = probabilities.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    return probabilities, weights, ids


class RouterLinear(nn.Module):
    """Weight and bias of a linear layer, replicated on every rank, created by Megatron's rules; `router_logits` applies them."""

    def __init__(self, config: ZayaConfig, input_size: int, output_size: int, bias: bool = True):
        super().__init__()
        self.weight = random_parameter(config, (output_size, input_size), config.router_init_method)
        self.bias = constant_parameter(config, (output_size,), 0.0) if bias else None


class RouterNorm(nn.Module):
    """Weight of the norm of the router state, and the router's own epsilon."""

    def __init__(self, config: ZayaConfig):
        super().__init__()
        self.eps = config.router_norm_epsilon
        self.weight = constant_parameter(config, (config.router_hidden_size,), 1.0)


class ZayaRouter(Float32BuffersMixin, nn.Module):
    """Router of one layer.

    Buffers, fp32 whatever the module is cast to, last entry the skip class: `balancing_biases` [E + 1], 0 but -1 for
    the skip class; `balancing_exp_avg`, `balancing_exp_avg_sq` [E + 1] and `balancing_step` (int64 scalar), the state
    of their AdamW, which `optim.balancing` updates. Not saved: `tokens_per_expert` (int64 [E + 1]) and
    `router_entropy_sum` (sum over tokens of the entropy of the softmax, nats), which only grow in training and with
    gradients on, so that activation recomputation counts each token once.
    """

    def __init__(self, config: ZayaConfig):
        super().__init__()
        self.config = config
        self.fused = getattr(config, "fused_router", False)
        r = config.router_hidden_size
        self.num_classes = config.num_router_classes
        self.down_proj = RouterLinear(config, config.hidden_size, r)
        self.router_states_scale = constant_parameter(config, (r,), 1.0) if config.router_eda else None
        self.norm = RouterNorm(config)
        self.fc1 = RouterLinear(config, r, r)
        self.fc2 = RouterLinear(config, r, r)
        self.out_proj = RouterLinear(config, r, self.num_classes, bias=False)

        def zeros(shape, dtype):
            return torch.zeros(shape, dtype=dtype, device=initial_device(config))

        entries = (config.num_moe_experts + 1,)
        biases = zeros(entries, torch.float32)
        biases[-1] = -1.0
        self.register_buffer("balancing_biases", biases)
        self.register_buffer("balancing_exp_avg", zeros(entries, torch.float32))
        self.register_buffer("balancing_exp_avg_sq", zeros(entries, torch.float32))
        self.register_buffer("balancing_step", zeros((), torch.int64))
        self.register_buffer("tokens_per_expert", zeros(entries, torch.int64), persistent=False)
        self.register_buffer("router_entropy_sum", zeros((), torch.float32), persistent=False)

    def set_layer_number(self, layer_number: int) -> None:
        """Drop gamma in layer 1, which has no state to take over; the released weights have none there either."""
        if layer_number == 1:
            self.router_states_scale = None

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """hidden_states [s, b, h] for the experts, and the down projection [s, b, r] for `forward`, by `input_and_linear`, whose text says when."""
        return input_and_linear(hidden_states, gathered(self.down_proj).weight)

    def forward(
        self,
        hidden_states: Tensor,
        router_state: Tensor | None = None,
        forced_expert_ids: Tensor | None = None,
        projected: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Route tokens.

        Args: hidden_states [s, b, h], normed; router_state [s, b, r] of the previous layer, None in the first;
        forced_expert_ids int64 [s, b], negative where the router is free (replay of a given routing); projected [s, b, r], what
        `project` made of hidden_states, which then are not read.
        Returns: weights [s, b], 0 where the skip class won and skip_output is zero; class ids int64 [s, b]; this
        layer's router state [s, b, r], after the averaging and before the norm.
        """
        averaged = self.router_states_scale is not None
        assert router_state is not None or not averaged, "the previous layer's router state did not arrive"
        down_proj, norm, fc1, fc2, out_proj = map(
            gathered, (self.down_proj, self.norm, self.fc1, self.fc2, self.out_proj)
        )
        if projected is None:
            projected = main_grad_linear(hidden_states, down_proj.weight)
        unweighted = (
            self.config.num_moe_experts if self.config.moe_skip_expert and self.config.skip_output == "zero" else -1
        )
        if self.fused:
            return self._through_hip_ops(projected, router_state if averaged else None, forced_expert_ids, unweighted)
        state, logits = router_logits(
            projected,
            router_state if averaged else None,
            self.router_states_scale,
            down_proj.bias,
            norm.weight,
            fc1.weight,
            fc1.bias,
            fc2.weight,
            fc2.bias,
            out_proj.weight,
            norm.eps,
        )
        probabilities, weights, ids = choose_expert(
            logits,
            self.balancing_biases[: self.num_classes],
            softmax_in_fp32=self.config.router_softmax_in_fp32,
            forced_expert_ids=forced_expert_ids,
        )
        if unweighted >= 0:
            weights = weights.masked_fill(ids == unweighted, 0.0)
        if self.training and torch.is_grad_enabled():
            self._count(probabilities, ids)
        return weights, ids, state

    def _through_hip_ops(
        self, projected: Tensor, router_state: Tensor | None, forced: Tensor | None, unweighted: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The same by `hip_ops.router_mlp`; the parameters have been gathered. projected [s, b, r]."""
        state, weights, ids, statistics = RouterMLP.apply(
            projected.flatten(0, 1),
            None if router_state is None else router_state.flatten(0, 1),
            self.router_states_scale,
            self.down_proj.bias,
            self.norm.weight,
            self.fc1.weight,
            self.fc1.bias,
            self.fc2.weight,
            self.fc2.bias,
            self.out_proj.weight,
            self.balancing_biases[: self.num_classes],
            None if forced is None else forced.flatten(),
            self.norm.eps,
            unweighted,
        )
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                count(self.tokens_per_expert, self.router_entropy_sum, statistics)
        rows = projected.shape[:2]
        return weights.view(rows), ids.view(rows), state.view_as(projected)

    @torch.no_grad()
    def _count(self, probabilities: Tensor, ids: Tensor) -> None:
        ids = ids.flatten()
        self.tokens_per_expert.scatter_add_(0, ids, torch.ones_like(ids))
        self.router_entropy_sum += torch.special.entr(probabilities.float()).sum()
