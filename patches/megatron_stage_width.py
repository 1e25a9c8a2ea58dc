# SPDX-License-Identifier: Apache-2.0
"""megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator._communicate: receives pipeline_state_size further
channels.

Both schedules make the shape of a received tensor from config.hidden_size, the interleaved one with no hook
(it refuses adjust_tensor_shapes_fn). A ZAYA stage also sends the router state (zaya_plugin/model/stream.py).
variable_seq_lengths would need no patch, but it sends every shape ahead of its tensor and waits for it on the host.
Configurations without `pipeline_state_size` are not changed.
"""

import functools

from zaya_plugin.patches.registry import MEGATRON, Patch


def wider(stock):
    @functools.wraps(stock)
    def communicate(self, *, tensor_shape, **named):
        extra = getattr(self.config, "pipeline_state_size", 0)
        if extra and tensor_shape:
            tensor_shape = (*tensor_shape[:-1], tensor_shape[-1] + extra)
        return stock(self, tensor_shape=tensor_shape, **named)

    return communicate


PATCH = Patch(
    symbol="megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator._communicate",
    make=wider,
    scope="always",
    reason="receives hidden_size channels from the stage before; a ZAYA stage sends the router state as well",
    upstream=MEGATRON + "core/pipeline_parallel/p2p_communication.py",
    until="the interleaved schedule takes adjust_tensor_shapes_fn",
)
