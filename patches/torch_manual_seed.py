# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.manual_seed: seeds the CPU generator; without CUDA torch queues the call and never makes it."""

import torch

from zaya_plugin.patches.registry import MEGATRON, Patch

PATCH = Patch(
    symbol="torch.cuda.manual_seed",
    package="torch",
    versions=">=2.6",
    make=lambda _: torch.manual_seed,
    reason="queued for a CUDA start that never comes, so the RNG tracker would not seed its model-parallel state",
    upstream=MEGATRON + "core/tensor_parallel/random.py",
)
