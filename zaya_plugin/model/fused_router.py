# SPDX-License-Identifier: Apache-2.0
"""The router behind its down projection by hip_ops: one pass forward, one for the chain of gradients, and three products for the matrices.

Kept for the backward pass: the state, which the next layer keeps too, both hidden layers before their GELU, the logits and the choice. Gradients of
all parameters go straight into `main_grad` where there is one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zaya_plugin.model.fusion import fused_on_accelerator
from zaya_plugin.model.main_grad import add_gradients, add_product


class RouterMLP(torch.autograd.Function):
    """`hip_ops.router_mlp` with gradients: its arguments -> state, weights, ids and statistics, of which the last two have none."""

    @staticmethod
    def forward(
        ctx, projected, previous, gamma, b_down, w_norm, w1, b1, w2, b2, w_out, biases, forced, eps, unweighted
    ):
        from hip_ops import router_mlp

        routed = router_mlp(
            projected,
            previous,
            gamma,
            b_down,
            w_norm,
            w1,
            b1,
            w2,
            b2,
            w_out,
            biases,
            forced,
            eps=eps,
            unweighted=unweighted,
        )
        state, weights, ids, hidden1, hidden2, logits, statistics = routed
        ctx.save_for_backward(previous, gamma, w_norm, w1, w2, w_out, state, ids, hidden1, hidden2, logits)
        # Parameters themselves: saved tensors lose the attributes that DDP sets.
        ctx.matrices, ctx.vectors, ctx.options = (
            (w1, w2, w_out),
            (b_down, gamma, w_norm, b1, b2),
            dict(eps=eps, unweighted=unweighted),
        )
        ctx.mark_non_differentiable(ids, statistics)
        ctx.set_materialize_grads(False)
        return state, weights, ids, statistics

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, d_state, d_weights, _, __):
        from hip_ops import router_mlp_backward
        from hip_ops.router_mlp import Routed

        previous, gamma, w_norm, w1, w2, w_out, state, ids, hidden1, hidden2, logits = ctx.saved_tensors
        if d_weights is None:
            d_weights = torch.zeros(
                len(state), dtype=torch.promote_types(state.dtype, torch.float32), device=state.device
            )
        routed = Routed(state, d_weights, ids, hidden1, hidden2, logits, d_weights)
        found = router_mlp_backward(d_weights, d_state, routed, previous, gamma, w_norm, w1, w2, w_out, **ctx.options)
        needs = ctx.needs_input_grad
        d_w1, d_w2, d_out = (
            add_product(matrix, a, b) if needed else None
            for matrix, needed, a, b in zip(
                ctx.matrices,
                (needs[5], needs[7], needs[9]),
                (found.d_hidden1, found.d_hidden2, found.d_logits),
                (found.normed, found.active1, found.active2),
                strict=True,
            )
        )
        needed = (needs[3], needs[2], needs[4], needs[6], needs[8])
        vectors = [vector if need else None for vector, need in zip(ctx.vectors, needed, strict=True)]
        d_b_down, d_gamma, d_norm, d_b1, d_b2 = add_gradients(vectors, found.sums.unbind())
        return (
            found.d_projected if needs[0] else None,
            found.d_previous if needs[1] else None,
            d_gamma,
            d_b_down,
            d_norm,
            d_w1,
            d_b1,
            d_w2,
            d_b2,
            d_out,
            None,
            None,
            None,
            None,
        )


@fused_on_accelerator
def count(tokens_per_expert: Tensor, router_entropy_sum: Tensor, statistics: Tensor) -> None:
    """Adds `statistics` of hip_ops.router_mlp to the two buffers."""
    counts = statistics[:-1]
    tokens_per_expert[: len(counts)].add_(counts.to(tokens_per_expert.dtype))
    router_entropy_sum.add_(statistics[-1])
