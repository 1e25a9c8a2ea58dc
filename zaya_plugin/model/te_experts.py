# SPDX-License-Identifier: Apache-2.0
"""The experts of one layer on Transformer Engine's grouped linears, through Megatron's wrappers.

Transformer Engine wants the rows per expert as a Python list, so each call waits once for the device.
"""

from __future__ import annotations

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.module import MegatronModule
from megatron.core.utils import get_pg_rank
from torch import Tensor

import hip_ops
from zaya_plugin.model.config import ZayaConfig
from zaya_plugin.model.experts import expert_sharded_state_dict, mark_block, reduce_over_expert_ranks


class TEGroupedExperts(MegatronModule):
    """Experts with the interface, parameter names and checkpoint keys of GroupedExperts.

    Args: num_local_experts, config, the two wrapper classes (Megatron's TEColumnParallelGroupedLinear and
    TERowParallelGroupedLinear or anything with their signatures) and pg_collection.
    """

    def __init__(self, num_local_experts: int, config: ZayaConfig, *, linear_fc1, linear_fc2, pg_collection=None):
        super().__init__(config)
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        self.pg_collection = pg_collection
        self.num_local_experts = num_local_experts
        self.first_expert = get_pg_rank(pg_collection.ep) * num_local_experts
        h, f = config.hidden_size, config.moe_ffn_hidden_size
        common = dict(config=config, bias=False, skip_bias_add=False, is_expert=True, pg_collection=pg_collection)
        self.linear_fc1 = linear_fc1(
            num_local_experts, h, 2 * f, init_method=config.init_method, tp_comm_buffer_name="fc1", **common
        )
        self.linear_fc2 = linear_fc2(
            num_local_experts, f, h, init_method=config.output_init_method, tp_comm_buffer_name="fc2", **common
        )

    def set_layer_number(self, layer_number: int) -> None:
        """Give the matrices their roles as members of the layer's two blocks. layer_number: in the whole model, from 1."""
        for linear in (self.linear_fc1, self.linear_fc2):
            matrices = [getattr(linear, f"weight{expert}") for expert in range(self.num_local_experts)]
            mark_block(matrices, layer_number, writes_first=False)
            for matrix in matrices:
                reduce_over_expert_ranks(matrix)

    def forward(self, x: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """x [T, h] sorted by expert, weights [T], offsets int32 [E] -> [T, h]; zeros at and beyond offsets[-1]."""
        ends = offsets.tolist()
        splits = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        gate_up, _ = self.linear_fc1(x[: ends[-1]], splits)
        output, _ = self.linear_fc2(hip_ops.weighted_swiglu(gate_up, weights[: ends[-1]]), splits)
        return torch.nn.functional.pad(output, (0, 0, 0, len(x) - ends[-1]))

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):
        """One checkpoint key per expert and matrix, with the expert's global index."""
        return expert_sharded_state_dict(self, prefix, sharded_offsets, metadata)
