# SPDX-License-Identifier: Apache-2.0
"""megatron.training.arguments.get_device_arch_version: returns 10, the generation from which Megatron asks for no
CUDA_DEVICE_MAX_CONNECTIONS.
"""

from zaya_plugin.patches.registry import MEGATRON, Patch

PATCH = Patch(
    symbol="megatron.training.arguments.get_device_arch_version",
    make=lambda _: lambda: 10,
    reason="argument validation with tensor or context parallelism reads the properties of GPU 0",
    upstream=MEGATRON + "training/arguments.py",
)
