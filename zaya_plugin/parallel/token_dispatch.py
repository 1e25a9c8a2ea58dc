# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: Megatron's dispatchers send tokens to the rank of their expert and the outputs back.

Tokens of the router's skip class belong to no expert. They are in no column of the routing map that Megatron gets, so
they are not sent, and their rows of the output are exact zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from torch import Tensor


class SkippingAlltoAllDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all dispatcher for tokens that may belong to no expert; Megatron's assumes that each belongs to
    `topk` experts.
    """

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """Return the number of tokens of each local expert, int64. routing_map: bool [T, E]."""
        tokens_per_expert = super().preprocess(routing_map)
        self.num_out_tokens = routing_map.sum()
        self._maybe_update_cuda_sync_point("before_permutation_1")
        return tokens_per_expert


DISPATCHERS = {"alltoall": SkippingAlltoAllDispatcher, "allgather": MoEAllGatherTokenDispatcher}


class ExpertParallelDispatch:
    """Runs the experts on the ranks of an expert-parallel group.

    Args:
        config: moe_token_dispatcher_type is "alltoall" (each token to its expert's rank) or "allgather" (all tokens to
            all ranks).
        local_experts: global indices of this rank's experts.
        pg_collection: with ep, expt_tp and tp_ep.
    """

    def __init__(self, config: TransformerConfig, local_experts: range, pg_collection):
        self.num_experts = config.num_moe_experts
        kind = DISPATCHERS[config.moe_token_dispatcher_type]
        self.dispatcher = kind(len(local_experts), list(local_experts), config=config, pg_collection=pg_collection)

    def __call__(
        self, tokens: Tensor, weights: Tensor, ids: Tensor, experts: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """Send the tokens to their experts' ranks, call `experts` there and return the outputs [T, h]; zeros for tokens
        of no expert.

        Args:
            tokens: [T, h].
            weights: [T].
            ids: int64 [T]; num_experts or greater for a token of no expert.
            experts: called with rows [R, h] of all ranks, sorted by local expert, weights [R] and offsets int32, the
                end of each expert's rows.
        """
        routing_map = ids.unsqueeze(1) == torch.arange(self.num_experts, device=ids.device)
        weights = weights.unsqueeze(1).masked_fill(~routing_map, 0.0)
        dispatcher = self.dispatcher
        rows, weights = dispatcher.dispatch_preprocess(tokens, routing_map, weights)
        rows, weights = dispatcher.token_dispatch(rows, weights)
        rows, tokens_per_expert, weights = dispatcher.dispatch_postprocess(rows, weights)
        offsets = tokens_per_expert.cumsum(0).to(device=tokens.device, dtype=torch.int32)
        # Every row belongs to an expert, so the experts leave no row uninitialised. There may be no rows.
        output = dispatcher.combine_preprocess(experts(rows, weights, offsets))
        return dispatcher.combine_postprocess(dispatcher.token_combine(output))
