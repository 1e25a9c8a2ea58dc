# SPDX-License-Identifier: Apache-2.0
"""megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._compute_per_buffer_param_layout.

DDP takes a layout of its buffers, but pretrain() computes it itself and offers no hook. The stock layout lets bucket
and shard borders fall inside a layer's experts; ours keeps a layer's experts one block (zaya_plugin/optim/sharding/layout.py).
For models without expert blocks it places parameters as the stock one does, up to where a bucket closes.
"""

from zaya_plugin import compat
from zaya_plugin.patches.registry import Patch


def install() -> None:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    from zaya_plugin.optim.sharding.layout import compute_expert_block_layout

    DistributedOptimizer._compute_per_buffer_param_layout = staticmethod(compute_expert_block_layout)


PATCH = Patch(
    symbol="megatron.core.optimizer.distrib_optimizer.DistributedOptimizer._compute_per_buffer_param_layout",
    scope="always",
    wanted=compat.lays_out_buffers,
    reason="stock borders fall inside experts, so the grouped GEMM would need a copy of all experts every step",
    install=install,
)
