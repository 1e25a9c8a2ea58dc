# SPDX-License-Identifier: Apache-2.0
"""megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator._communicate: what crosses a stage is wider here.

Both schedules make the shape of a received tensor from config.hidden_size, the interleaved one with no hook
(adjust_tensor_shapes_fn is refused there). A ZAYA stage also hands over the router state (zaya_plugin/parallel/
stage_boundary.py). variable_seq_lengths would do without a patch, but sends every shape ahead of its tensor and waits for
it on the host. Configurations without `pipeline_state_size` are left alone.
"""

from zaya_plugin.patches.registry import Patch


def install() -> None:
    import functools

    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    stock = P2PCommunicator._communicate

    @functools.wraps(stock)
    def communicate(self, *, tensor_shape, **named):
        extra = getattr(self.config, "pipeline_state_size", 0)
        if extra and tensor_shape:
            tensor_shape = (*tensor_shape[:-1], tensor_shape[-1] + extra)
        return stock(self, tensor_shape=tensor_shape, **named)

    P2PCommunicator._communicate = communicate


PATCH = Patch(
    symbol="megatron.core.pipeline_parallel.p2p_communication.P2PCommunicator._communicate",
    scope="always",
    reason="receives hidden_size channels from the stage before; a ZAYA stage sends the router state as well",
    install=install,
)
