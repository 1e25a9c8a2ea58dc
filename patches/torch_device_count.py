# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.device_count: 0 makes Megatron skip its process groups and its seeding."""

from zaya_plugin.patches.registry import Patch


def install() -> None:
    import torch

    torch.cuda.device_count = lambda: 1


PATCH = Patch(
    symbol="torch.cuda.device_count",
    package="torch",
    versions=">=2.6",
    reason="with 0 Megatron skips model-parallel groups and seeding, and the checkpoint writer divides by it",
    install=install,
)
