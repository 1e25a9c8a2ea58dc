# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.current_device: returns the CPU, where Megatron then puts buffers, masks and RoPE frequencies."""

import torch

from zaya_plugin.patches.registry import MEGATRON, Patch

CPU = torch.device("cpu")

PATCH = Patch(
    symbol="torch.cuda.current_device",
    package="torch",
    versions=">=2.6",
    make=lambda _: lambda: CPU,
    reason="raises without CUDA; Megatron asks it for the device of every buffer (initialize.py, mappings.py, DDP)",
    upstream=MEGATRON + "training/initialize.py",
)
