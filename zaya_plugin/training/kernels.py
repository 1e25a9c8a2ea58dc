# SPDX-License-Identifier: Apache-2.0
"""The versions of the operators that a recipe selects, and the table of the versions that run."""

from __future__ import annotations

import os

import torch

import hip_ops
from hip_ops.runtime.operator import report
from zaya_plugin.config.schema import Recipe


def select_kernels(recipe: Recipe) -> None:
    """Select versions by cluster.kernels and cluster.kernel_overrides. HIP_OPS_KERNELS, for scripts without a recipe,
    is not read.
    """
    hip_ops.set_kernels(recipe.cluster.kernels, recipe.cluster.kernel_overrides, group="cluster.")


def kernel_lines(recipe: Recipe) -> list[str]:
    """Return a line for each operator: its version on this rank's device, and why; and the version of core attention.
    Empty on a CPU, where all versions are references.

    A version is built and compared with its reference at its first use, not here. A version that fails is replaced with
    a warning.
    """
    if recipe.cluster.device == "cpu":
        return []
    versions = report(torch.device("cuda", torch.cuda.current_device()), check=False)
    lines = [f"core_attention: {recipe.cluster.core_attention} (cluster.core_attention)", *versions]
    lines = ["kernels, each compared with its reference at its first use", *(f"  {line}" for line in lines)]
    if torch.version.cuda and recipe.cluster.core_attention == "sdpa":
        try:
            torch.backends.cudnn.version()
        except RuntimeError as error:
            lines.append(
                f"WARNING: torch's cuDNN does not fit ({str(error).splitlines()[0]}), so torch may choose a slower "
                "attention. Fix: cluster.core_attention=cudnn"
            )
    wants_fp32 = recipe.cluster.transformer_impl == "transformer_engine" and recipe.cluster.dtype == "fp32"
    if wants_fp32 and torch.version.cuda and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0":
        lines.append(
            "WARNING: Transformer Engine's fp32 products are TF32. Fix: NVIDIA_TF32_OVERRIDE=0 in the environment"
        )
    return lines
