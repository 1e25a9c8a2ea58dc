# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.current_device: where Megatron puts buffers, masks and RoPE frequencies."""

from zaya_plugin.patches.registry import Patch


def install() -> None:
    import torch

    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu


PATCH = Patch(
    symbol="torch.cuda.current_device",
    package="torch",
    versions=">=2.6",
    reason="raises without CUDA; Megatron asks it for the device of every buffer (initialize.py, mappings.py, DDP)",
    install=install,
)
