# SPDX-License-Identifier: Apache-2.0
"""megatron.core.tensor_parallel.random._set_cuda_rng_state: sets the CPU generator."""

import torch

from zaya_plugin.patches.registry import MEGATRON, Patch

PATCH = Patch(
    symbol="megatron.core.tensor_parallel.random._set_cuda_rng_state",
    make=lambda _: lambda new_state, device=-1, graph_safe=False: torch.set_rng_state(new_state),
    reason="queued for a CUDA start that never comes; recomputation would draw other random numbers",
    upstream=MEGATRON + "core/tensor_parallel/random.py",
)
