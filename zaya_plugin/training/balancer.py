# SPDX-License-Identifier: Apache-2.0
"""The experts' biases move after the backward passes of a step, in any host."""

from __future__ import annotations

from megatron.core import parallel_state

from zaya_plugin.model.moe import ZayaMoELayer
from zaya_plugin.optim.balancing import RouterStatistics, over_pipeline_stages, update_biases


class Balancer:
    """Balances the experts of this rank's models.

    Attributes:
        statistics: of the routers of all layers of the model in the last step; None before the first step.
    """

    def __init__(self):
        self.statistics: RouterStatistics | None = None
        self.moe_layers: list[ZayaMoELayer] | None = None

    def balance(self, model) -> RouterStatistics:
        """Balance the experts of this rank's chunks by the counts of all ranks; once a step, after the backward
        passes. Return the statistics.
        """
        if self.moe_layers is None:
            layers = (m for chunk in model for m in chunk.modules() if isinstance(m, ZayaMoELayer))
            self.moe_layers = sorted(layers, key=lambda layer: layer.layer_number)
        # All ranks that routed other tokens, tensor-parallel ranks included: each has its part of the sequence.
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        routers = [layer.router for layer in self.moe_layers]
        config = routers[0].config
        statistics = update_biases(routers, config, group)
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            numbers = [layer.layer_number for layer in self.moe_layers]
            stages = parallel_state.get_pipeline_model_parallel_group()
            statistics = over_pipeline_stages(statistics, numbers, config.num_layers, stages)
        self.statistics = statistics
        return statistics
