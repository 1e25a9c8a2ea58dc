# SPDX-License-Identifier: Apache-2.0
"""ZAYA1's router: a small MLP on a latent state that runs through all layers, top-1, balanced by biases.

Source: arXiv 2605.05365 section II-A-2, transformers `ZayaRouter`. Unusual: the state r_l = W h + b + gamma * r_{l-1}
is handed from layer to layer before its norm (exponential depth averaging); one class more than there are experts may
be scored, whose tokens skip the MoE; the routing weight is the probability as it is, neither renormalised nor biased.
"""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hip_ops
from hip_ops.ops.router_mlp import Routed, RouterParameters
from hip_ops.runtime.main_grad import add_gradients, add_product, main_grad_linear
from zaya_plugin.ground.errors import message, mistake
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.parameters import (
    Float32BuffersMixin,
    constant_parameter,
    gathered,
    initial_device,
    random_parameter,
)


class RouterMLP(torch.autograd.Function):
    """`hip_ops.router_mlp` with gradients: projected, previous, forced, eps, unweighted and the RouterParameters one by
    one -> state, weights, ids and statistics; ids and statistics have no gradient.

    Kept for the backward pass: the state, which the next layer keeps too, both hidden layers before their GELU, the
    logits and the choice. Gradients of all parameters go straight into `main_grad` where there is one.
    """

    @staticmethod
    def forward(ctx, projected, previous, forced, eps, unweighted, *parameters):
        ctx.parameters = RouterParameters(*parameters)  # themselves: saved tensors lose the attributes that DDP sets
        ctx.options = dict(eps=eps, unweighted=unweighted)
        routed = hip_ops.router_mlp(projected, previous, ctx.parameters, forced, **ctx.options)
        state, weights, ids, hidden1, hidden2, logits, statistics = routed
        ctx.save_for_backward(previous, state, ids, hidden1, hidden2, logits, *parameters[:-1])  # no biases
        ctx.mark_non_differentiable(ids, statistics)
        ctx.set_materialize_grads(False)
        return state, weights, ids, statistics

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_state, d_weights, _, __):
        previous, state, ids, hidden1, hidden2, logits, *saved = ctx.saved_tensors
        if d_weights is None:
            d_weights = torch.zeros(len(state), dtype=hip_ops.wide(state.dtype), device=state.device)
        routed = Routed(state, d_weights, ids, hidden1, hidden2, logits, d_weights)
        needs_projected, needs_previous, *_ = ctx.needs_input_grad
        needs = ctx.needs_input_grad[-len(RouterParameters._fields) :]
        results = hip_ops.router_mlp_backward(
            d_weights, d_state, routed, previous, RouterParameters(*saved, None), **ctx.options, trained=any(needs)
        )
        d_projected = results.d_projected if needs_projected else None
        d_previous = results.d_previous if needs_previous else None
        if not any(needs):  # frozen, as with adapters
            return d_projected, d_previous, None, None, None, *[None] * len(needs)
        mine = RouterParameters(*(p if need else None for p, need in zip(ctx.parameters, needs, strict=True)))
        d_b_down, d_gamma, d_norm, d_b1, d_b2, d_w1, d_w2, d_out = add_gradients(
            [mine.b_down, mine.gamma, mine.w_norm, mine.b1, mine.b2, mine.w1, mine.w2, mine.w_out],
            [*results.sums, results.d_w1, results.d_w2, results.d_out],
        )
        gradients = RouterParameters(d_gamma, d_b_down, d_norm, d_w1, d_b1, d_w2, d_b2, d_out, biases=None)
        return d_projected, d_previous, None, None, None, *gradients


class InputAndLinear(torch.autograd.Function):
    """x [..., in] and weight [out, in] -> x again, for the other reader, and x W^T. The backward product adds to the
    other reader's gradient of x.

    Autograd would store the product, and another pass would read both gradients and write their sum: 8.0 ms of a step
    of 40 layers on H200s, where the product that adds takes 1.9 ms longer (`router` in
    benchmarks/results/step40-h200-graphs.json and, before it, step40-2xh200-graphs.json).

    The gradient of the first result is overwritten, so no other code may hold that tensor. Autograd does not check
    this; see `input_and_linear`.
    """

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight  # the parameter itself: a saved tensor loses the attributes that DDP sets
        ctx.set_materialize_grads(False)
        return x.view_as(x), F.linear(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_x, grad):
        if grad is None:
            return grad_x, None
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_weight = add_product(ctx.weight, rows, x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        if grad_x is None or not ctx.needs_input_grad[0]:
            return grad @ weight if ctx.needs_input_grad[0] else None, grad_weight
        if grad_x.is_contiguous() and not grad_x.requires_grad:
            into = grad_x.view(-1, grad_x.shape[-1])
            torch.addmm(into, rows, weight, out=into)
        else:  # it belongs to a graph of the backward pass, or it is an expanded tensor
            grad_x = grad_x + grad @ weight
        return grad_x, grad_weight


def input_and_linear(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return x for its other reader and F.linear(x, weight), whose gradients go to `main_grad` and into the other
    reader's gradient of x.

    Conditions: the other reader is one function, directly or behind views; its backward allocates the gradient (a
    gather of rows does; an addition, which returns one tensor for both operands, does not); the first result has no
    other use: no hook, no second reader, no return to a caller. Not differentiable twice.
    """
    if not (torch.is_grad_enabled() and x.requires_grad):
        return x, main_grad_linear(x, weight)
    return InputAndLinear.apply(x, weight)


@hip_ops.formula
def count(tokens_per_expert: Tensor, router_entropy_sum: Tensor, statistics: Tensor) -> None:
    """Add `statistics` of hip_ops.router_mlp to the two buffers."""
    counts = statistics[:-1]
    tokens_per_expert[: len(counts)].add_(counts.to(tokens_per_expert.dtype))
    router_entropy_sum.add_(statistics[-1])


class StepsWithoutBalancing:
    """Count a router's training steps since its last balancing, and warn at the second one, once a process.

    A step is over when a backward pass has reached the router and its gradient is gone at the next forward pass. This
    reads no device memory.
    """

    warned = False

    def __init__(self):
        self.steps, self.backward_ran = 0, False

    def forward_begins(self, weight: Tensor) -> None:
        """weight: a matrix of the router; DDP keeps its gradient in `main_grad` and marks that in
        `grad_added_to_main_grad`.
        """
        kept = weight.grad is not None or getattr(weight, "grad_added_to_main_grad", False)
        if kept or not self.backward_ran:
            return
        self.steps, self.backward_ran = self.steps + 1, False
        if self.steps == 2 and not StepsWithoutBalancing.warned:
            StepsWithoutBalancing.warned = True
            text = message(
                "experts",
                problem="they were not balanced in two training steps; without balancing a few experts get most tokens",
                fix="zaya_plugin.balance_experts([model]) in every step after the backward passes, or "
                "zaya_plugin.muon_optimizer, whose step() balances",
            )
            warnings.warn(text, stacklevel=2)

    def backward_begins(self, _: Tensor) -> None:
        """Hook of a tensor that the router returned."""
        self.backward_ran = True


def action_of(replay) -> str | None:
    """Return what a router's RouterReplay asks for: record, replay_forward, replay_backward or None."""
    return None if replay.router_replay_action is None else replay.router_replay_action.value


def check_classes(ids: Tensor, classes: int) -> None:
    """Raise ValueError unless a batch's routing lies in [-1, classes).

    ids: integers of any shape, on the host. classes: the model's experts, and the skip class if it has one.
    """
    if ids.numel() and (ids.min() < -1 or ids.max() >= classes):
        problem = "is no routing of this model, whether it comes from stage.replay_routing or from a batch"
        allowed = f"-1, where the router is free, to {classes - 1}"
        raise mistake("routed_experts", f"{int(ids.min())} to {int(ids.max())}", problem=problem, allowed=allowed)


def replayed_ids(replay, rows: torch.Size, device: torch.device, classes: int) -> Tensor | None:
    """Return the class ids int64 [s, b] that Megatron's RouterReplay holds for `rows` = (s, b), negative where the
    router is free; None where it replays nothing.

    Raises:
        ValueError: it holds another number of tokens, or on the host a class that the model lacks.
    """
    if (action := action_of(replay)) not in ("replay_forward", "replay_backward"):
        return None
    target = replay.target_topk_idx if action == "replay_forward" else replay.replay_backward_list.pop(0)
    if target is None or target.numel() != rows.numel():
        raise mistake(
            "RouterReplay.set_replay_data",
            None if target is None else list(target.shape),
            problem=f"this rank's tokens are {rows[0]} x {rows[1]}",
            allowed=f"[{rows.numel()}, 1] in each layer, the sequences' first tokens before their second ones",
        )
    if target.device.type == "cpu":  # elsewhere the check would wait for the device
        check_classes(target, classes)
    return target.to(device, torch.int64).view(rows)


class RouterLinear(nn.Module):
    """Weight and bias of a linear layer, replicated on every rank, created by Megatron's rules; `hip_ops.router_mlp`
    applies them.
    """

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

    Buffers, which stay fp32 in every cast of the module, last entry the skip class: `balancing_biases` [E + 1], 0 but
    -1 for the skip class; `balancing_exp_avg`, `balancing_exp_avg_sq` [E + 1] and `balancing_step` (int64 scalar), the
    state of their AdamW, which `optim.balancing` updates. Not saved: `tokens_per_expert` (int64 [E + 1]) and
    `router_entropy_sum` (sum over tokens of the entropy of the softmax, nats), which only grow in training and with
    gradients on, so that activation recomputation counts each token once.
    """

    def __init__(self, config: ZayaConfig):
        super().__init__()
        self.config = config
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
        self.steps = StepsWithoutBalancing()
        self.router_replay = None
        if config.moe_enable_routing_replay:  # registers itself in Megatron's list of all routers, by construction
            from megatron.core.transformer.moe.router_replay import RouterReplay  # not in Primus' Megatron

            self.router_replay = RouterReplay()

    def set_layer_number(self, layer_number: int) -> None:
        """Drop gamma in layer 1, which receives no state; the released weights have none there either."""
        if layer_number == 1:
            self.router_states_scale = None

    def reset_counts(self) -> None:
        """Start the counts of the next step; called by `optim.balancing`."""
        self.tokens_per_expert.zero_()
        self.router_entropy_sum.zero_()
        self.steps = StepsWithoutBalancing()

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden_states [s, b, h] for the experts and the down projection [s, b, r] for `forward`; see
        `input_and_linear` for its conditions.
        """
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
        forced_expert_ids int64 [s, b], negative where the router is free (replay of a given routing), None: as
        Megatron's RouterReplay of this router says, if it has one; projected [s, b, r], the down projection by
        `project`; hidden_states are not read then.
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
        replay, rows = self.router_replay, projected.shape[:2]
        if replay is not None and forced_expert_ids is None:
            forced_expert_ids = replayed_ids(replay, rows, projected.device, self.num_classes)
        unweighted = (
            self.config.num_moe_experts if self.config.moe_skip_expert and self.config.skip_output == "zero" else -1
        )
        parameters = RouterParameters(
            gamma=self.router_states_scale,
            b_down=down_proj.bias,
            w_norm=norm.weight,
            w1=fc1.weight,
            b1=fc1.bias,
            w2=fc2.weight,
            b2=fc2.bias,
            w_out=out_proj.weight,
            biases=self.balancing_biases[: self.num_classes],
        )
        state, weights, ids, statistics = RouterMLP.apply(
            projected.flatten(0, 1),
            router_state.flatten(0, 1) if averaged else None,
            None if forced_expert_ids is None else forced_expert_ids.flatten(),
            norm.eps,
            unweighted,
            *parameters,
        )
        if self.training and torch.is_grad_enabled():
            if down_proj.weight.requires_grad:
                self.steps.forward_begins(down_proj.weight)
                weights.register_hook(self.steps.backward_begins)
            with torch.no_grad():
                count(self.tokens_per_expert, self.router_entropy_sum, statistics)
        if replay is not None and action_of(replay) == "record":
            replay.record_indices(ids.unsqueeze(1))
        return weights.view(rows), ids.view(rows), state.view_as(projected)
