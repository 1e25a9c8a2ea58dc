# SPDX-License-Identifier: Apache-2.0
"""The host side of a kernel's launch: dtypes, views of tensors as contiguous rows at any distance, as row kernels take
them, results, the device, and tile and grid, chosen once for each set of sizes.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

WARP_SIZE = 32 if torch.version.hip is None else 64  # lanes, of the devices that this torch is built for
XCDS = 1 if torch.version.hip is None else 8  # accelerator complex dies, among which an MI300X distributes programs
ROWS_A_BLOCK = 4
BLOCKS_A_PROCESSOR = 32  # at most; beyond, a wave takes several rows
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_NO_CHANGE = contextlib.nullcontext()


def architecture(device: torch.device) -> str:
    """Return the name by which compilers, tuning tables and libraries know a device: "gfx942" for an AMD GPU, "sm_90"
    for an NVIDIA one, otherwise its type.
    """
    if device.type != "cuda":
        return device.type
    if torch.version.hip is not None:
        return torch.cuda.get_device_properties(device).gcnArchName.split(":")[0]  # "gfx942:sramecc+:xnack-"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Make `device` current for Triton, which launches on the current device. Does nothing where it already is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NO_CHANGE
    return torch.cuda.device(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors or compute units. A CPU counts as one, so that blocks also loop over small
    inputs.
    """
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return fp64 for fp64 and fp32 for every other dtype."""
    return torch.promote_types(dtype, torch.float32)


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return `tensor.to(dtype)`, without its microseconds on the host where there is nothing to convert."""
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def as_rows(tensor: Tensor) -> Tensor:
    """Return [..., h] as [rows, h] with contiguous rows; a copy only where no such view exists."""
    flat = tensor if tensor.dim() == 2 else tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] < 2 else flat.contiguous()


def contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    """Return the tensors, contiguous; None stays None."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def empty_results(*tensors: Tensor | None, like: Tensor) -> list[Tensor]:
    """Return for each tensor an uninitialised one of its shape and dtype, contiguous; for None one without elements of
    the dtype of `like`.
    """
    return [
        torch.empty(0 if t is None else t.shape, dtype=(like if t is None else t).dtype, device=like.device)
        for t in tensors
    ]


def written_rows(tensor: Tensor) -> Tensor:
    """Return `tensor` [rows, h], which a kernel writes to. Raises ValueError where its rows are not contiguous.

    A copy, as `as_rows` makes one, would receive the results instead of the tensor.
    """
    if tensor.stride(1) != 1 and tensor.shape[1] > 1:
        raise ValueError(f"hip_ops: rows that are written to must be contiguous; strides are {tensor.stride()}")
    return tensor


def clear_rows_(rows: Tensor, kept: Tensor) -> Tensor:
    """Set rows [n, ...] to zero in place where kept int32 [n] is 0, also rows with NaN; kept is -1 for the other rows.

    It computes an integer `and` with kept: on a CPU masked_fill_ takes five times as long.
    """
    integer = INTEGERS[rows.element_size()]
    kept = kept.to(integer)
    rows.view(integer).bitwise_and_(kept if rows.dim() == 1 else kept.unsqueeze(-1))
    return rows


def starts_aligned(tensor: Tensor) -> bool:
    """Return whether each row of the last dimension starts at a multiple of 16 bytes."""
    starts = (tensor.data_ptr(), *(stride * tensor.element_size() for stride in tensor.stride()[:-1]))
    return not any(start % 16 for start in starts)


def describable(x: Tensor) -> bool:
    """Return whether a tensor descriptor can access the tensor: contiguous rows that start at multiples of 16
    bytes.
    """
    *strides, last = x.stride()
    if last != 1 or x.data_ptr() % 16:
        return False
    size = x.element_size()
    return all(stride > 0 and stride * size % 16 == 0 for stride in strides)


def aligned(*tensors: Tensor) -> bool:
    """Return whether each row of each tensor starts and ends at a multiple of 16 bytes."""
    return all(starts_aligned(t) and t.shape[1] * t.element_size() % 16 == 0 for t in tensors)


def blocks_for(rows: int, device: torch.device) -> int:
    """Return the blocks of a launch with one row per wave, up to a maximum. A CPU counts as one compute unit, so that
    its waves loop.
    """
    return min(-(-rows // ROWS_A_BLOCK), multiprocessors(device) * BLOCKS_A_PROCESSOR)


def rows_for_a_second(device: torch.device) -> int:
    """Return a number of rows, for the self-check's examples, of which some waves take a second one."""
    return ROWS_A_BLOCK * BLOCKS_A_PROCESSOR * multiprocessors(device) + 5


def run_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, device: torch.device, **keywords: Any) -> None:
    """Launch a Triton kernel on `device`; an empty grid launches nothing."""
    if all(grid):
        with on(device):
            kernel[grid](*arguments, **keywords)


@dataclass(frozen=True)
class Launch:
    """Tile, grid and options of a kernel.

    rows, columns: of a tile. programs: the largest number of them over the rows; None: one a tile. stages: tiles in
    flight. registers: maximum per thread, None: no limit (NVIDIA only).
    """

    rows: int
    columns: int
    num_warps: int
    programs: int | None = None
    stages: int = 1
    registers: int | None = None

    @property
    def options(self) -> dict:
        return {"num_warps": self.num_warps} | ({"maxnreg": self.registers} if self.registers else {})

    def grid(self, rows: int, columns: int | None = None, processors: int = 1) -> tuple[int, ...]:
        """Return the number of programs over the rows, each with equally many tiles, and over the columns.

        processors: multiplies `programs`, where they are counted by multiprocessor.
        """
        tiles = -(-rows // self.rows)
        if self.programs is not None and tiles:
            tiles = -(-tiles // -(-tiles // (self.programs * processors)))
        return (tiles,) if columns is None else (tiles, -(-columns // self.columns))


@functools.lru_cache(maxsize=1024)
def plan(
    choose: Callable[..., Launch], names: tuple[str, ...], extent: tuple[int, ...], *sizes, processors=1, **options
) -> tuple[tuple[int, ...], dict]:
    """Return the grid over `extent`, (rows,) or (rows, columns), and the kernel's keywords.

    choose: the module's `launch`, which gets sizes, options and the warp size; it is part of the key because benchmarks
    and tests replace it. names: those of the kernel for rows, columns and stages of a tile.
    """
    chosen = choose(*sizes, warp_size=WARP_SIZE, **options)
    tile = zip(names, (chosen.rows, chosen.columns, chosen.stages), strict=False)
    return chosen.grid(*extent, processors=processors), dict(tile) | chosen.options
