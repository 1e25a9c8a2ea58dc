# SPDX-License-Identifier: Apache-2.0
"""quack's GEMMs on Hopper (package quack-kernels, a requirement of FlashAttention-4): where they run, and their tiles."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from hip_ops.runtime.architecture import architecture


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the result that a multiprocessor computes at a time, and multiprocessors that share operands.

    pingpong: two tiles in turn, one is multiplied while the other is stored.
    """

    m: int
    n: int
    pingpong: bool
    cluster_m: int
    cluster_n: int

    def words(self) -> dict:
        """As arguments of quack's gemm."""
        return {
            "tile_M": self.m,
            "tile_N": self.n,
            "cluster_M": self.cluster_m,
            "cluster_N": self.cluster_n,
            "pingpong": self.pingpong,
            "persistent": True,
        }


def available(device: torch.device) -> str | None:
    """Why quack is not available on `device`, or None."""
    if importlib.util.find_spec("quack") is None:
        return "quack is not installed (package quack-kernels)"
    if device.type != "cuda" or architecture(device) != "sm_90":
        return "quack's tiles are Hopper's (sm_90)"
    return None
