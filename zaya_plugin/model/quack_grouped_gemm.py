# SPDX-License-Identifier: Apache-2.0
"""quack's grouped GEMM on Hopper (package quack-kernels, which FlashAttention-4 brings along): CuTe's warp-specialised pipelines over groups of rows.

A compiler that is told what each warp does reaches more of Hopper than Triton does, above all where the product is added to fp32 blocks, for the memory system
adds a tile while the next one is multiplied. Sums are fp32 and each number is added once, so the bits are the same in every repetition. All products
have one tile, measured on an H200 (TILE, benchmarks/results/quack_tiles-h200.json); quack's own tuner would measure in every process of a run, and a process that
finds another tile has other bits.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hip_ops.architecture import architecture
from zaya_plugin.model.main_grad import add_or_write

QUACK = "quack.gemm"  # imported where it is used; nothing here depends on it
PLANS = 4096  # some kilobytes each
ALIGNMENT = 16  # bytes, of addresses and strides: what the copy engine of a multiprocessor takes


@dataclass(frozen=True)
class Tile:
    """Rows and columns of the result a multiprocessor makes at a time, and multiprocessors that share operands.

    pingpong: two tiles in turn, one multiplied while the other leaves.
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


TILE = Tile(192, 128, True, 1, 2)


def borders(offsets: Tensor) -> Tensor:
    """int32 [E + 1]: 0 and `offsets`. Made once for offsets that several products get, and kept with them.

    What was made outside of a graph's capture is not used in one, where it would be the border of that moment for ever. Offsets that two captures are given as
    one static input would get those of the first: this project captures whole passes, which make their own.
    """
    if offsets.is_inference():  # counts no versions
        return F.pad(offsets, (1, 0))
    state = offsets._version, offsets.is_cuda and torch.cuda.is_current_stream_capturing()
    kept = getattr(offsets, "borders_of_groups", None)
    if kept is None or kept[0] != state:
        offsets.borders_of_groups = kept = (state, F.pad(offsets, (1, 0)))
    return kept[1]


def _regular(tensor: Tensor) -> bool:
    """Rows without gaps, of blocks [E, m, n] rows or columns, and everything else in steps of ALIGNMENT."""
    along = [place for place, stride in enumerate(tensor.stride()) if stride == 1]
    steps = [stride * tensor.itemsize for stride in tensor.stride() if stride != 1]
    sizes = tensor.shape[-2:] if tensor.dim() == 3 else tensor.shape[-1:]
    return (
        len(along) == 1
        and along[0] >= (1 if tensor.dim() == 3 else tensor.dim() - 1)
        and all(step > 0 and step % ALIGNMENT == 0 for step in steps)
        and all(size * tensor.itemsize % ALIGNMENT == 0 for size in sizes)
        and tensor.data_ptr() % ALIGNMENT == 0
    )


class QuackGroupedGemm:
    """quack.gemm.gemm with groups of rows that lie in device memory (`cu_seqlens_m`, `cu_seqlens_k`); compared with a loop at its first use."""

    name, forms = "quack", ("rows_t", "rows", "outer")

    def available(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if importlib.util.find_spec("quack") is None:
            return "quack is not installed (package quack-kernels)"
        if device.type != "cuda" or architecture(device) != "sm_90":
            return "quack's tile is Hopper's (sm_90)"
        if dtype != torch.bfloat16:
            return f"quack's gemm does not take {dtype}"
        return _wrong_on(device)

    def takes(self, *tensors: Tensor) -> bool:
        return all(map(_regular, tensors))

    def rows(self, x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], matrices.shape[2])
        if len(x):
            _gemm()(x, matrices.mT, out, None, None, cu_seqlens_m=borders(offsets), **TILE.words())
        return out

    def outer(self, a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
        out = a.new_empty(len(offsets), a.shape[1], b.shape[1])
        self.add_outer(out, a, b, offsets, accumulate=False)
        return out

    def add_outer(self, total: Tensor, a: Tensor, b: Tensor, offsets: Tensor, accumulate: bool = True) -> None:
        if not len(a):
            add_or_write(total, torch.zeros_like(total), accumulate)
        elif _regular(total) and total.stride(2) == 1:
            _gemm()(
                a.mT, b.mT, total, None, None, cu_seqlens_k=borders(offsets), add_to_output=accumulate, **TILE.words()
            )
        else:
            add_or_write(total, self.outer(a, b, offsets), accumulate)


def _gemm() -> Callable:
    """quack's function. It keeps a plan for every number of rows, which under expert parallelism is another one in every call: more than PLANS are dropped."""
    module = importlib.import_module(QUACK)
    plans = getattr(module, "_gemm_plan_cache", ())
    if len(plans) > PLANS:
        plans.clear()
    return module.gemm


@functools.cache
def _wrong_on(device: torch.device) -> str | None:
    """What is wrong with its products on `device`, or None."""
    from hip_ops.grouped_product import wrong_beside_reference

    implementation = QuackGroupedGemm()
    try:
        return wrong_beside_reference(device, implementation.rows, implementation.add_outer)
    except (
        Exception
    ) as error:  # a release with other arguments, a compiler that fails: whatever it is, there are others
        return f"quack: {type(error).__name__}: {error}"
