# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.current_device: returns the CPU, where Megatron then puts buffers, masks and RoPE frequencies."""

from zaya_plugin.patches.registry import MEGATRON, Patch


def cpu(_):
    import torch

    device = torch.device("cpu")
    return lambda: device


PATCH = Patch(
    symbol="torch.cuda.current_device",
    package="torch",
    versions=">=2.6",
    make=cpu,
    reason="raises without CUDA; Megatron asks it for the device of every buffer (initialize.py, mappings.py, DDP)",
    upstream=MEGATRON + "training/initialize.py",
)
