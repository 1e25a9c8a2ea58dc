# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.set_device: Megatron binds every rank to a device at start."""

from zaya_plugin.patches.registry import Patch


def install() -> None:
    import torch

    torch.cuda.set_device = lambda device: None


PATCH = Patch(
    symbol="torch.cuda.set_device",
    package="torch",
    versions=">=2.6",
    reason="raises without CUDA; called at start by megatron.training.initialize",
    install=install,
)
