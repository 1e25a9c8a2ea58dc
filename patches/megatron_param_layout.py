# SPDX-License-Identifier: Apache-2.0
"""megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._compute_per_buffer_param_layout: keeps a layer's
experts one block.

DDP takes a layout of its buffers, but pretrain() computes it itself and has no hook. In the stock layout bucket and
shard borders can fall inside a layer's experts; zaya_plugin/optim/sharding/placement.py keeps them whole. For models
without expert blocks it places parameters as the stock one does, up to the places where a bucket closes.
"""

from zaya_plugin import compat
from zaya_plugin.patches.registry import MEGATRON, Patch


def expert_blocks(_):
    from zaya_plugin.optim.sharding.placement import compute_expert_block_layout

    return staticmethod(compute_expert_block_layout)


PATCH = Patch(
    symbol="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._compute_per_buffer_param_layout",
    make=expert_blocks,
    scope="always",
    condition=compat.lays_out_buffers,
    reason="stock borders fall inside experts, so the grouped GEMM would need a copy of all experts every step",
    upstream=MEGATRON + "core/optimizer/distrib_optimizer.py",
    until="pretrain() takes a layout of the buffers",
)
