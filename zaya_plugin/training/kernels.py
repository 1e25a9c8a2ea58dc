# SPDX-License-Identifier: Apache-2.0
"""The versions of the operators that a recipe asks for, and the table of what runs."""

from __future__ import annotations

import torch

import hip_ops
from hip_ops.runtime.operator import report
from zaya_plugin.config.schema import Recipe


def select_kernels(recipe: Recipe) -> None:
    """Sets what cluster.kernels and cluster.kernel_overrides say; the defaults leave HIP_OPS_KERNELS in force."""
    cluster = recipe.cluster
    if cluster.kernels == "auto" and not cluster.kernel_overrides:
        hip_ops.set_kernels(None)
    else:
        hip_ops.set_kernels(cluster.kernels, cluster.kernel_overrides)


def kernel_lines(device: torch.device) -> list[str]:
    """The version of every operator on `device`, and why. Nothing is built or compared here: that happens at each first use."""
    return ["kernels", *(f"  {line}" for line in report(device, check=False))]
