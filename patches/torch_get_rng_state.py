# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.get_rng_state: reads the CPU generator."""

import torch

from zaya_plugin.patches.registry import MEGATRON, Patch

PATCH = Patch(
    symbol="torch.cuda.get_rng_state",
    package="torch",
    versions=">=2.6",
    make=lambda _: lambda device="cuda": torch.get_rng_state(),
    reason="raises without CUDA; the RNG tracker and checkpoints read it",
    upstream=MEGATRON + "training/checkpointing.py",
)
