# SPDX-License-Identifier: Apache-2.0
"""ZAYA1's mixture of experts: route, sort tokens by expert, run the experts, put tokens back. Dropless, top-1.

The router state comes in as an argument and goes out as a return value and is never kept on the module, so that
activation recomputation and pipeline stages see it. A rank that holds all experts sorts its own tokens. Under expert
parallelism tokens are exchanged (`parallel.token_dispatch`), also between tensor-parallel ranks, each of which routes
its own part of the sequence.
"""

from __future__ import annotations

from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.utils import get_pg_size
from torch import Tensor

import hip_ops
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.router import ZayaRouter
from zaya_plugin.parallel.token_dispatch import ExpertParallelDispatch


class ZayaMoELayer(MegatronModule):
    """Router and experts of one layer.

    Args: config; submodules, a ModuleSpec or class for the experts; pg_collection. Further keywords that the host
    passes to any MoE layer are accepted and not used.
    """

    def __init__(
        self,
        config: ZayaConfig,
        submodules: ModuleSpec | type,
        layer_number: int | None = None,
        pg_collection=None,
        **_,
    ):
        super().__init__(config)
        pg_collection = pg_collection or ProcessGroupCollection.use_mpu_process_groups()
        self.tp_group = pg_collection.tp
        self.num_experts = config.num_moe_experts
        num_local_experts = self.num_experts // get_pg_size(pg_collection.ep)
        self.identity_skip = config.moe_skip_expert and config.skip_output == "identity"
        modules = config.recompute_modules if config.recompute_granularity == "selective" else ()
        self.recompute = "moe" in modules
        self.recompute_rows = "permute" in modules and not self.recompute
        self.router = ZayaRouter(config)
        self.experts = build_module(submodules, num_local_experts, config, pg_collection=pg_collection)
        self.dispatch = None
        if num_local_experts < self.num_experts:
            first = self.experts.first_expert
            self.dispatch = ExpertParallelDispatch(config, range(first, first + num_local_experts), pg_collection)
        if layer_number is not None:
            self.set_layer_number(layer_number)

    def set_layer_number(self, layer_number: int) -> None:
        """Called by the host's layer, with the number counted over all pipeline stages from 1."""
        self.layer_number = layer_number
        self.router.set_layer_number(layer_number)
        self.experts.set_layer_number(layer_number)

    def forward(
        self, hidden_states: Tensor, router_state: Tensor | None = None, forced_expert_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, h] normed, router_state [s, b, r] -> output [s, b, h], next router state [s, b, r].

        s is this rank's part of the sequence; forced_expert_ids int64 [s, b], as in ZayaRouter, is cut likewise. The
        state is None where the model has no averaging.
        """
        if self.recompute and self.training:
            return tensor_parallel.checkpoint(self._forward, False, hidden_states, router_state, forced_expert_ids)
        return self._forward(hidden_states, router_state, forced_expert_ids)

    def _forward(self, hidden_states, router_state, forced_expert_ids):
        projected = None
        if self.dispatch is None and not self.identity_skip:
            # The gather of rows is then the only other reader of the tokens: its gradient may be overwritten
            # (`input_and_linear`).
            hidden_states, projected = self.router.project(hidden_states)
        weights, ids, router_state = self.router(hidden_states, router_state, forced_expert_ids, projected)
        tokens_Th, weights_T, ids_T = hidden_states.flatten(0, 1), weights.flatten(), ids.flatten()
        if self.dispatch is not None:
            output_Th = self.dispatch(tokens_Th, weights_T, ids_T, self.experts)
        else:
            output_Th = self._local(tokens_Th, weights_T, ids_T)
        if self.identity_skip:
            skip_T1 = weights_T.masked_fill(ids_T != self.num_experts, 0.0).unsqueeze(-1)
            output_Th = output_Th + (tokens_Th * skip_T1).to(output_Th.dtype)
        return output_Th.view_as(hidden_states), router_state if self.config.router_eda else None

    def _local(self, tokens_Th: Tensor, weights_T: Tensor, ids_T: Tensor) -> Tensor:
        """Run the experts where all are on this rank; padding rows are not moved."""
        order = hip_ops.sort_by_expert(ids_T, self.num_experts)
        rows_Th, row_weights_T = hip_ops.permute_to_experts(tokens_Th, order, weights_T)
        recompute_rows = None
        if self.recompute_rows and self.training:
            # The experts do not save their rows. The router saves the tokens that they are sorted from in any case.
            detached_Th = tokens_Th.detach()
            recompute_rows = lambda: hip_ops.permute_to_experts(detached_Th, order)[0]  # noqa: E731
        output_Th = self.experts(rows_Th, row_weights_T, order.offsets, recompute_rows)
        return hip_ops.unpermute_from_experts(output_Th, order)
