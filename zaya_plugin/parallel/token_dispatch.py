# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism: tokens travel to the rank of their expert and the outputs back, by Megatron's dispatchers.

Unusual: there is one class more than there are experts, whose tokens skip the MoE. They are in no column of the routing
map that Megatron gets, so they never travel, and their rows come back as exact zeros.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.token_dispatcher import MoEAllGatherTokenDispatcher, MoEAlltoAllTokenDispatcher
from torch import Tensor


class SkippingAlltoAllDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all, where a token may belong to no expert; it takes every token to belong to `topk` of them."""

    def preprocess(self, routing_map: Tensor) -> Tensor:
        """routing_map bool [T, E] -> tokens of each local expert int64."""
        tokens_per_expert = super().preprocess(routing_map)
        self.num_out_tokens = routing_map.sum()
        self._maybe_update_cuda_sync_point("before_permutation_1")
        return tokens_per_expert


DISPATCHERS = {"alltoall": SkippingAlltoAllDispatcher, "allgather": MoEAllGatherTokenDispatcher}


class ExpertParallelDispatch:
    """Runs experts that lie on the ranks of an expert-parallel group.

    Args: config with moe_token_dispatcher_type "alltoall" (each token to its expert's rank) or "allgather" (all tokens
    to all ranks); local_experts, the global indices of this rank's; pg_collection with ep, expt_tp and tp_ep.
    """

    def __init__(self, config: TransformerConfig, local_experts: range, pg_collection):
        self.num_experts = config.num_moe_experts
        kind = DISPATCHERS[config.moe_token_dispatcher_type]
        self.dispatcher = kind(len(local_experts), list(local_experts), config=config, pg_collection=pg_collection)

    def __call__(
        self, tokens: Tensor, weights: Tensor, ids: Tensor, experts: Callable[[Tensor, Tensor, Tensor], Tensor]
    ) -> Tensor:
        """experts(rows [R, h] sorted by local expert, weights [R], offsets int32) of all ranks' tokens, put back.

        Args: tokens [T, h]; weights [T]; ids int64 [T], at num_experts and beyond for tokens of no expert.
        Returns [T, h]; zeros for tokens of no expert.
        """
        routing_map = ids.unsqueeze(1) == torch.arange(self.num_experts, device=ids.device)
        weights = weights.unsqueeze(1).masked_fill(~routing_map, 0.0)
        dispatcher = self.dispatcher
        rows, weights = dispatcher.dispatch_preprocess(tokens, routing_map, weights)
        rows, weights = dispatcher.token_dispatch(rows, weights)
        rows, tokens_per_expert, weights = dispatcher.dispatch_postprocess(rows, weights)
        offsets = tokens_per_expert.cumsum(0).to(device=tokens.device, dtype=torch.int32)
        # Every row belongs to an expert, so experts leave none uninitialised. There may be no rows.
        output = dispatcher.combine_preprocess(experts(rows, weights, offsets))
        return dispatcher.combine_postprocess(dispatcher.token_combine(output))
