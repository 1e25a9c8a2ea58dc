# SPDX-License-Identifier: Apache-2.0
"""Availability, tiles and call of quack's GEMM on Hopper (package quack-kernels, a requirement of FlashAttention-4)."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hip_ops.runtime.launch import architecture

GEMM_MODULE = "quack.gemm"  # imported at first use
MAX_PLANS = 4096  # some kilobytes each
ALIGNMENT = 16  # bytes; alignment of addresses and strides that TMA requires


@dataclass(frozen=True)
class Tile:
    """Rows (m) and columns (n) of the result that a multiprocessor computes at a time, and the cluster that shares
    operands.

    pingpong: two tiles alternate; one is multiplied while the other is stored.
    """

    m: int
    n: int
    pingpong: bool
    cluster_m: int
    cluster_n: int

    def words(self) -> dict:
        """Return the tile as keyword arguments of quack's gemm."""
        return {
            "tile_M": self.m,
            "tile_N": self.n,
            "cluster_M": self.cluster_m,
            "cluster_N": self.cluster_n,
            "pingpong": self.pingpong,
            "persistent": True,
        }


def available(device: torch.device) -> str | None:
    """Return why quack is not available on `device`, or None."""
    if importlib.util.find_spec("quack") is None:
        return "quack is not installed (package quack-kernels)"
    if device.type != "cuda" or architecture(device) != "sm_90":
        return "quack's tiles are Hopper's (sm_90)"
    return None


def aligned(*tensors: Tensor) -> bool:
    """Return whether there are rows, contiguous (blocks [E, m, n]: rows or columns), with all strides multiples of
    ALIGNMENT.
    """
    for tensor in tensors:
        along = [place for place, stride in enumerate(tensor.stride()) if stride == 1]
        steps = [stride for stride in tensor.stride() if stride != 1]
        sizes = (*tensor.shape[-2:],) if tensor.dim() == 3 else tensor.shape[-1:]
        if len(along) != 1 or along[0] == 0 or not len(tensor) or not all(step > 0 for step in steps):
            return False
        if any(extent * tensor.itemsize % ALIGNMENT for extent in (*steps, *sizes)) or tensor.data_ptr() % ALIGNMENT:
            return False
    return True


def gemm() -> Callable:
    """Return quack's function, and clear its plans above MAX_PLANS: it keeps one per number of rows, which changes in
    every call under expert parallelism.
    """
    module = importlib.import_module(GEMM_MODULE)
    plans = getattr(module, "_gemm_plan_cache", ())
    if len(plans) > MAX_PLANS:
        plans.clear()
    return module.gemm
