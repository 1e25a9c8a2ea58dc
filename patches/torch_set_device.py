# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.set_device: does nothing; Megatron binds every rank to a device at start."""

from zaya_plugin.patches.registry import MEGATRON, Patch

PATCH = Patch(
    symbol="torch.cuda.set_device",
    package="torch",
    versions=">=2.6",
    make=lambda _: lambda device: None,
    reason="raises without CUDA; called at start by megatron.training.initialize",
    upstream=MEGATRON + "training/initialize.py",
)
