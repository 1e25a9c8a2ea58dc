# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.synchronize: does nothing; every Megatron timer calls it."""

from zaya_plugin.patches.registry import MEGATRON, Patch

PATCH = Patch(
    symbol="torch.cuda.synchronize",
    package="torch",
    versions=">=2.6",
    make=lambda _: lambda device=None: None,
    reason="raises without CUDA; CPU work is synchronous already (core/timers.py, checkpoint writers)",
    upstream=MEGATRON + "core/timers.py",
)
