# SPDX-License-Identifier: Apache-2.0
"""megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu: returns numpy numbers for a tensor that is
on the CPU already.

With a GPU the function brings the rows that each rank sends and receives to the host as numpy numbers, which the
all-to-all takes. A tensor on the CPU it returns unchanged, and the all-to-all cannot take a tensor.
"""

from zaya_plugin.patches.registry import MEGATRON, Patch


def as_numbers(stock):
    def maybe_move_tensor_to_cpu(tensor, as_numpy=False, record_stream=False):
        moved = stock(tensor, as_numpy, record_stream)
        return moved.numpy() if as_numpy and hasattr(moved, "numpy") else moved

    return maybe_move_tensor_to_cpu


PATCH = Patch(
    symbol="megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
    make=as_numbers,
    reason="leaves counts that are on the CPU as tensors, which the all-to-all of expert parallelism cannot take",
    upstream=MEGATRON + "core/transformer/moe/moe_utils.py",
)
