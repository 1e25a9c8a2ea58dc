# SPDX-License-Identifier: Apache-2.0
"""megatron.core.tensor_parallel.random._get_cuda_rng_state: reads the CPU generator."""

import torch

from zaya_plugin.patches.registry import MEGATRON, Patch

PATCH = Patch(
    symbol="megatron.core.tensor_parallel.random._get_cuda_rng_state",
    make=lambda _: lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state(),
    reason="starts CUDA and reads its default generator; needed by recomputation and the RNG tracker",
    upstream=MEGATRON + "core/tensor_parallel/random.py",
)
