# SPDX-License-Identifier: Apache-2.0
"""megatron.training.arguments.get_device_arch_version: asks the driver of GPU 0, with tensor or context parallelism."""

from zaya_plugin.patches.registry import Patch


def newest_arch() -> int:
    """The generation from which Megatron asks for no CUDA_DEVICE_MAX_CONNECTIONS."""
    return 10


def install() -> None:
    from megatron.training import arguments

    arguments.get_device_arch_version = newest_arch


PATCH = Patch(
    symbol="megatron.training.arguments.get_device_arch_version",
    reason="argument validation with tensor or context parallelism reads the properties of GPU 0",
    install=install,
)
