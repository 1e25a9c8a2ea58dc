# SPDX-License-Identifier: Apache-2.0
"""megatron.core.tensor_parallel.random._set_cuda_rng_state: sets the CPU generator."""

from zaya_plugin.patches.registry import MEGATRON, Patch


def cpu_generator(_):
    import torch

    return lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state)


PATCH = Patch(
    symbol="megatron.core.tensor_parallel.random._set_cuda_rng_state",
    make=cpu_generator,
    reason="queued for a CUDA start that never comes; recomputation would draw other random numbers",
    upstream=MEGATRON + "core/tensor_parallel/random.py",
)
