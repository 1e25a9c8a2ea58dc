# SPDX-License-Identifier: Apache-2.0
"""Matrix products over rows sorted by expert, in Triton: x W_e^T, x W_e, and a_e^T b_e added to fp32 blocks.

As many programs as there is room for walk the tiles of all experts; how many each expert has is counted on the device. Here operands
come and results leave through tensor descriptors (TMA on Hopper); grouped_pointer_product.py is the same for everything else. An
expert's last rows do not fill a tile, and the next expert's follow: results leave, and operands of a_e^T b_e come, through descriptors that
cut off at the expert's end (ragged_rows.py). Sums are added to `out` by the memory system, which gets each number once: no read on the
way, the same bits every time.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from hip_ops.architecture import architecture
from hip_ops.triton_kernels import grouped_pointer_product as pointers
from hip_ops.triton_kernels.expert_tiles import expert_borders, find_expert, outer_tiles
from hip_ops.triton_kernels.grouped_configs import GroupedConfig, choose_config
from hip_ops.triton_kernels.ragged_rows import load_rows, ragged_rows, store_rows
from hip_ops.triton_kernels.tiles import grouped_tile


@triton.jit
def grouped_rows_kernel(
    x_desc, w_desc, out_desc, offsets, experts, n, k,
    TRANSPOSED: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PARTS: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """out[rows of e] = x[rows of e] W_e; W_e stored [k, n], or TRANSPOSED as [n, k]."""
    starts, ends = expert_borders(offsets, experts, EXPERTS)
    columns = tl.cdiv(n, BLOCK_N)
    tile_ends = tl.cumsum(tl.cdiv(ends - starts, BLOCK_M) * columns)
    tiles = tl.max(tile_ends)
    for position in tl.range(tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN):
        expert, start, end, place = find_expert(position, starts, ends, tile_ends)
        row, column = grouped_tile(place, tl.cdiv(end - start, BLOCK_M), columns, GROUP)
        row0, column0 = row * BLOCK_M, column * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for at in range(0, k, BLOCK_K):
            x = x_desc.load([start + row0, at])  # past the end lie other rows: what comes of them is not stored
            if TRANSPOSED:
                w = w_desc.load([expert, column0, at]).reshape(BLOCK_N, BLOCK_K).T
            else:
                w = w_desc.load([expert, at, column0]).reshape(BLOCK_K, BLOCK_N)
            acc = tl.dot(x, w, acc, input_precision="ieee")
        if PARTS == 2:
            left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
            store_rows(out_desc, start, end, row0, column0, left.to(out_desc.dtype), BLOCK_M, BLOCK_N // 2)
            store_rows(out_desc, start, end, row0, column0 + BLOCK_N // 2, right.to(out_desc.dtype), BLOCK_M, BLOCK_N // 2)
        else:
            store_rows(out_desc, start, end, row0, column0, acc.to(out_desc.dtype), BLOCK_M, BLOCK_N)


@triton.jit
def _leave(out_desc, expert, row0, column0, acc, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTS: tl.constexpr, ACCUMULATE: tl.constexpr,
           REDUCE: tl.constexpr):  # fmt: skip
    """A tile in PARTS pieces, each of which needs its shared memory only until it has left."""
    if PARTS > 1:
        left, right = acc.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
        _leave(out_desc, expert, row0, column0, left, ROWS, COLUMNS // 2, PARTS // 2, ACCUMULATE, REDUCE)
        _leave(out_desc, expert, row0, column0 + COLUMNS // 2, right, ROWS, COLUMNS // 2, PARTS // 2, ACCUMULATE, REDUCE)
    elif ACCUMULATE and REDUCE:
        out_desc.atomic_add([expert, row0, column0], acc.reshape(1, ROWS, COLUMNS))
    else:
        if ACCUMULATE:
            acc += out_desc.load([expert, row0, column0]).reshape(ROWS, COLUMNS).to(tl.float32)
        out_desc.store([expert, row0, column0], acc.to(out_desc.dtype).reshape(1, ROWS, COLUMNS))


@triton.jit
def grouped_outer_kernel(
    a_desc, b_desc, out_desc, offsets, experts, m, n,
    ACCUMULATE: tl.constexpr, REDUCE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """out[e] (+)= a[rows of e]^T b[rows of e], [m, n]. An expert without rows is passed over, or, without ACCUMULATE, gets zeros."""
    starts, ends = expert_borders(offsets, experts, EXPERTS)
    rows, columns = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tile_ends = tl.cumsum(outer_tiles(starts, ends, experts, rows * columns, ACCUMULATE, EXPERTS))
    tiles = tl.max(tile_ends)
    for position in range(tl.program_id(0), tiles, tl.num_programs(0)):
        expert, start, end, place = find_expert(position, starts, ends, tile_ends)
        row, column = grouped_tile(place, rows, columns, GROUP)
        row0, column0 = row * BLOCK_M, column * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for at in range(0, tl.maximum(end - start, 1), BLOCK_K):
            a = load_rows(a_desc, start, end, at, row0, BLOCK_K, BLOCK_M)
            b = load_rows(b_desc, start, end, at, column0, BLOCK_K, BLOCK_N)
            acc = tl.dot(a.T, b, acc, input_precision="ieee")
        _leave(out_desc, expert, row0, column0, acc, BLOCK_M, BLOCK_N, PARTS, ACCUMULATE, REDUCE)


@triton.jit
def grouped_flat_outer_kernel(
    a_desc, b_desc, out_desc, offsets, experts, m, n,
    ACCUMULATE: tl.constexpr, REDUCE: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The same as one loop over the steps of all tiles of a program, so that the next tile's operands come while this one's sums leave.

    Triton's `flatten` wants inner loops of one length; here each expert has its own.
    """
    starts, ends = expert_borders(offsets, experts, EXPERTS)
    rows, columns = tl.cdiv(m, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tiles = outer_tiles(starts, ends, experts, rows * columns, ACCUMULATE, EXPERTS)
    tile_ends = tl.cumsum(tiles)
    first, programs = tl.program_id(0), tl.num_programs(0)
    mine = tl.cdiv(tl.maximum(tile_ends - first, 0), programs) - tl.cdiv(tl.maximum(tile_ends - tiles - first, 0), programs)
    total = tl.sum(mine * tl.maximum(tl.cdiv(ends - starts, BLOCK_K), 1))
    position, step, steps = first - programs, -1, 0
    expert, start, end, row0, column0 = 0, 0, 0, 0, 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for _ in range(0, total):
        step = tl.where(step == steps - 1, 0, step + 1)
        if step == 0:
            position += programs
            expert, start, end, place = find_expert(position, starts, ends, tile_ends)
            steps = tl.maximum(tl.cdiv(end - start, BLOCK_K), 1)
            row, column = grouped_tile(place, rows, columns, GROUP)
            row0, column0 = row * BLOCK_M, column * BLOCK_N
        a = load_rows(a_desc, start, end, step * BLOCK_K, row0, BLOCK_K, BLOCK_M)
        b = load_rows(b_desc, start, end, step * BLOCK_K, column0, BLOCK_K, BLOCK_N)
        acc = tl.dot(a.T, b, acc, input_precision="ieee")
        if step == steps - 1:
            _leave(out_desc, expert, row0, column0, acc, BLOCK_M, BLOCK_N, PARTS, ACCUMULATE, REDUCE)
            acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def table_part(device: torch.device) -> str:
    """The part of the table that serves a device; a CPU, on which Triton interprets, counts as Hopper."""
    return "sm_90" if device.type == "cpu" else architecture(device)


def describable(x: Tensor) -> bool:
    """Whether a tensor descriptor can read or write it: rows without gaps, starting in steps of 16 bytes."""
    return x.stride(-1) == 1 and all(s > 0 and s * x.element_size() % 16 == 0 for s in x.stride()[:-1]) and x.data_ptr() % 16 == 0


def _on(device: torch.device):
    """Triton launches on the current device, and autograd's or a caller's may be another."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _programs(device: torch.device, config: GroupedConfig, most_tiles: int) -> int:
    """Never more than there can be tiles; one each for config.programs == 0."""
    if config.programs == 0:
        return max(most_tiles, 1)
    return max(1, min(most_tiles, config.programs * (4 if device.type == "cpu" else _multiprocessors(device))))


def _config(device: torch.device, kind: str, tokens: int, experts: int, k: int, n: int, config: GroupedConfig | None, tensors) -> GroupedConfig:
    config = config or choose_config(table_part(device), kind, tokens // experts, k, n)
    if config.descriptors and not all(map(describable, tensors)):
        config = replace(config, descriptors=False, flatten=False)
    return config


def grouped_rows(x: Tensor, matrices: Tensor, offsets: Tensor, config: GroupedConfig | None = None) -> Tensor:
    """As hip_ops.reference.grouped_product.grouped_rows, but rows of no expert are not written. matrices may be a transposed view."""
    experts, k, n = matrices.shape
    out = torch.empty((len(x), n), dtype=x.dtype, device=x.device)
    if not (len(x) and n and k and experts):
        return out.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    transposed = matrices.stride(2) != 1
    stored = matrices.mT if transposed else matrices
    stored = stored if stored.stride(2) == 1 else stored.contiguous()
    config = _config(x.device, "rows_t" if transposed else "rows", len(x), experts, k, n, config, (x, stored, out))
    most = (triton.cdiv(len(x), config.block_m) + experts) * triton.cdiv(n, config.block_n)
    programs, offsets = _programs(x.device, config, most), offsets.contiguous()
    if not config.descriptors:
        with _on(x.device):
            pointers.launch_rows(x, stored, out, offsets, transposed, config, programs)
        return out
    matrix = [config.block_n, config.block_k] if transposed else [config.block_k, config.block_n]
    with _on(x.device):
        grouped_rows_kernel[(programs,)](
            TensorDescriptor.from_tensor(x, [config.block_m, config.block_k]), TensorDescriptor.from_tensor(stored, [1, *matrix]),
            ragged_rows(out, [config.block_m, config.block_n // config.parts]), offsets, experts, n, k, TRANSPOSED=transposed,
            FLATTEN=config.flatten, **_constants(experts, config), num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip
    return out


def grouped_outer_(out: Tensor, a: Tensor, b: Tensor, offsets: Tensor, accumulate: bool, config: GroupedConfig | None = None) -> None:
    """As hip_ops.reference.grouped_product.grouped_outer_."""
    experts, m, n = out.shape
    if not (experts and m and n):
        return
    if not len(a):
        return None if accumulate else out.zero_()
    a, b = (t if t.stride(1) == 1 else t.contiguous() for t in (a, b))
    config = _config(a.device, "outer", len(a), experts, m, n, config, (a, b, out))
    programs = _programs(a.device, config, experts * triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n))
    offsets = offsets.contiguous()
    if not config.descriptors:
        with _on(a.device):
            pointers.launch_outer(a, b, out, offsets, accumulate, config, programs)
        return
    with _on(a.device):
        (grouped_flat_outer_kernel if config.flatten else grouped_outer_kernel)[(programs,)](
            ragged_rows(a, [config.block_k, config.block_m]), ragged_rows(b, [config.block_k, config.block_n]),
            TensorDescriptor.from_tensor(out, [1, config.block_m, config.block_n // config.parts]), offsets, experts, m, n, ACCUMULATE=accumulate,
            REDUCE=config.reduce and out.dtype == torch.float32, **_constants(experts, config), num_warps=config.num_warps, num_stages=config.num_stages,
        )  # fmt: skip


def _constants(experts: int, config: GroupedConfig) -> dict:
    return dict(
        EXPERTS=triton.next_power_of_2(experts), BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, PARTS=config.parts,
        GROUP=config.group,
    )  # fmt: skip
