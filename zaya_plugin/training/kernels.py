# SPDX-License-Identifier: Apache-2.0
"""The versions of the operators that a recipe asks for, and the table of what runs."""

from __future__ import annotations

import torch

import hip_ops
from hip_ops.runtime.operator import report
from zaya_plugin.config.schema import Recipe


def select_kernels(recipe: Recipe) -> None:
    """Sets what cluster.kernels and cluster.kernel_overrides say. HIP_OPS_KERNELS, which is for scripts without a recipe, is not read."""
    hip_ops.set_kernels(recipe.cluster.kernels, recipe.cluster.kernel_overrides, group="cluster.")


def kernel_lines(recipe: Recipe) -> list[str]:
    """The version of every operator on this rank's device, and why; nothing on a CPU, where all are references.

    Nothing is built or compared here: that happens at each first use, and a version that fails is replaced with a warning.
    """
    if recipe.cluster.device == "cpu":
        return []
    versions = report(torch.device("cuda", torch.cuda.current_device()), check=False)
    return ["kernels, each compared with its reference at its first use", *(f"  {line}" for line in versions)]
