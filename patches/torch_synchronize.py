# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.synchronize: called by every Megatron timer."""

from zaya_plugin.patches.registry import Patch


def install() -> None:
    import torch

    torch.cuda.synchronize = lambda device=None: None


PATCH = Patch(
    symbol="torch.cuda.synchronize",
    package="torch",
    versions=">=2.6",
    reason="raises without CUDA; CPU work is synchronous already (core/timers.py, checkpoint writers)",
    install=install,
)
