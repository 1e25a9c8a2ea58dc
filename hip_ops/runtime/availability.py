# SPDX-License-Identifier: Apache-2.0
"""Finds whether a version can run on a device, without compiling anything."""

from __future__ import annotations

import importlib.util
import os

import torch

from hip_ops.runtime.build import prebuilt, shipped
from hip_ops.runtime.compilers import CompilerNotFound, find_compiler
from hip_ops.runtime.library import target_of


def missing(version: str, device: torch.device, named: bool) -> str | None:
    """Return why `version` is not available on `device`, or None. named: requested by name, not through auto."""
    if version == "hip":
        return _hip(device, named)
    if version == "compiled" and device.type == "cpu":
        return "torch.compile is not used on a CPU"
    if version in ("triton", "compiled") and importlib.util.find_spec("triton") is None:
        return "Triton is not installed (it comes with the GPU builds of torch)"
    if version == "compiled" and os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        return "TORCHDYNAMO_DISABLE=1 disables torch.compile"
    if version == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "Triton compiles for GPUs (TRITON_INTERPRET=1 runs it in an interpreter)"
    return None


def _hip(device: torch.device, named: bool) -> str | None:
    if not named and (device.type == "cpu" or torch.version.hip is None):
        return f"on {'a CPU' if device.type == 'cpu' else 'NVIDIA'} its build is slow and only verifies the kernels"
    try:
        target = target_of(device)
        if shipped(target)[0]:
            return None
    except ValueError as error:
        return str(error)
    try:
        find_compiler(target)
    except CompilerNotFound as error:
        if prebuilt(target) is None:
            return (
                f"{error}; and the cache holds no library for {target} (`python -m hip_ops build` on a machine that "
                "has a compiler)"
            )
    return None
