# SPDX-License-Identifier: Apache-2.0
"""megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu.

With a GPU it brings the rows that each rank sends and receives to the host as numpy numbers, which the all-to-all takes.
A tensor that is on the CPU already it returns as it is, and the all-to-all cannot take a tensor.
"""

from zaya_plugin.patches.registry import Patch


def install() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    original = token_dispatcher.maybe_move_tensor_to_cpu

    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        moved = original(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and hasattr(moved, "numpy") else moved

    token_dispatcher.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


PATCH = Patch(
    symbol="megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
    reason="leaves counts that are on the CPU as tensors, which the all-to-all of expert parallelism cannot take",
    install=install,
)
