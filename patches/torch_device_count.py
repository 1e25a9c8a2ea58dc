# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.device_count: returns 1, since Megatron skips its process groups and its seeding at 0."""

from zaya_plugin.patches.registry import MEGATRON, Patch

PATCH = Patch(
    symbol="torch.cuda.device_count",
    package="torch",
    versions=">=2.6",
    make=lambda _: lambda: 1,
    reason=(
        "with 0 devices Megatron skips model-parallel groups and seeding, and the checkpoint writer divides by the "
        "number"
    ),
    upstream=MEGATRON + "training/initialize.py",
)
