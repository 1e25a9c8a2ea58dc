# SPDX-License-Identifier: Apache-2.0
"""megatron.core.tensor_parallel.random._get_cuda_rng_state: reads the CPU generator."""

from zaya_plugin.patches.registry import MEGATRON, Patch


def cpu_generator(_):
    import torch

    return lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()


PATCH = Patch(
    symbol="megatron.core.tensor_parallel.random._get_cuda_rng_state",
    make=cpu_generator,
    reason="starts CUDA and reads its default generator; needed by recomputation and the RNG tracker",
    upstream=MEGATRON + "core/tensor_parallel/random.py",
)
