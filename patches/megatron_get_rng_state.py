# SPDX-License-Identifier: Apache-2.0
"""megatron.core.tensor_parallel.random._get_cuda_rng_state: reads the CPU generator."""

from zaya_plugin.patches.registry import Patch


def install() -> None:
    import torch
    from megatron.core.tensor_parallel import random

    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()


PATCH = Patch(
    symbol="megatron.core.tensor_parallel.random._get_cuda_rng_state",
    reason="starts CUDA and reads its default generator; needed by recomputation and the RNG tracker",
    install=install,
)
