# SPDX-License-Identifier: Apache-2.0
"""The sort by expert in Triton, a counting sort in two launches, and the gather of rows along its maps. No atomics; the
host never waits.

Same functions as reference.py. In the first launch each program counts the experts of its
tokens. In the second, each adds up the counts of the programs before it, which gives the first rows of its own tokens.
Importing this module imports triton.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from hip_ops.runtime.launch import Launch, as_rows, empty_results, plan, run_kernel

TILE_NAMES = ("ROWS", "BLOCK")
PROGRAMS = 256  # of the sort, at most, because each program reads the counts of all


@triton.jit
def _experts_of(expert_ids, token, tokens, num_experts, EXPERTS: tl.constexpr):
    """Return the expert of each token, or -1, and one row per token with a 1 at its expert."""
    inside = token < tokens
    ids = tl.load(expert_ids + token, mask=inside, other=-1)
    expert = tl.where((ids >= 0) & (ids < num_experts), ids, -1).to(tl.int32)
    return inside, expert, (expert[:, None] == tl.arange(0, EXPERTS)[None, :]).to(tl.int32)


@triton.jit
def expert_count_kernel(expert_ids, counted, tokens, num_experts, tiles, EXPERTS: tl.constexpr, TILE: tl.constexpr):
    """Count the experts of the program's tokens, `tiles` tiles of them, into counted [programs, EXPERTS]."""
    program = tl.program_id(0)
    total = tl.zeros([EXPERTS], tl.int32)
    for tile in range(tiles):
        token = (program * tiles + tile) * TILE + tl.arange(0, TILE)
        _, _, ones = _experts_of(expert_ids, token, tokens, num_experts, EXPERTS)
        total += tl.sum(ones, axis=0)
    tl.store(counted + program * EXPERTS + tl.arange(0, EXPERTS), total)


@triton.jit
def expert_place_kernel(
    expert_ids, counted, token_of_row, row_of_token, counts, offsets, tokens, num_experts, tiles, programs,
    EXPERTS: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):
    """Write both maps for the program's tokens; program 0 writes counts and offsets. ROWS: programs whose counts are
    added at a time.
    """
    program = tl.program_id(0)
    experts = tl.arange(0, EXPERTS)
    total, before = tl.zeros([EXPERTS], tl.int32), tl.zeros([EXPERTS], tl.int32)
    for first in range(0, programs, ROWS):
        other = first + tl.arange(0, ROWS)[:, None]
        program_counts = tl.load(counted + other * EXPERTS + experts[None, :], mask=other < programs, other=0)
        total += tl.sum(program_counts, axis=0)
        before += tl.sum(tl.where(other < program, program_counts, 0), axis=0)
    ends = tl.cumsum(total, axis=0)
    if program == 0:
        tl.store(counts + experts, total, mask=experts < num_experts)
        tl.store(offsets + experts, ends, mask=experts < num_experts)
    next_row = ends - total + before
    # Padding rows come after the rows of all experts and after the padding rows of earlier programs.
    next_padding = tl.sum(total, axis=0) + program * tiles * TILE - tl.sum(before, axis=0)
    for tile in range(tiles):
        token = (program * tiles + tile) * TILE + tl.arange(0, TILE)
        inside, expert, ones = _experts_of(expert_ids, token, tokens, num_experts, EXPERTS)
        rank = tl.cumsum(ones, axis=0) - 1 + next_row[None, :]
        padding = (expert < 0).to(tl.int32)
        rank_of_padding = next_padding + tl.cumsum(padding, axis=0) - 1
        row = tl.where(expert < 0, rank_of_padding, tl.sum(ones * rank, axis=1))
        tl.store(row_of_token + token, tl.where(expert < 0, -1 - row, row), mask=inside)
        tl.store(token_of_row + row, tl.where(expert < 0, -1 - token, token), mask=inside)
        next_row += tl.sum(ones, axis=0)
        next_padding += tl.sum(padding, axis=0)


@triton.jit
def expert_gather_kernel(
    source, index, side, out, side_out, rows, hidden, source_stride, HAS_SIDE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute out[i] = source[index[i]] and side_out[i] = side[index[i]]; zeros where index is negative."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = row < rows
    place = tl.load(index + row, mask=inside, other=-1)
    live = place >= 0
    if HAS_SIDE:
        if tl.program_id(1) == 0:
            tl.store(side_out + row, tl.load(side + place, mask=live, other=0.0), mask=inside)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    within = columns < hidden
    from_row = source + place.to(tl.int64)[:, None] * source_stride
    value = tl.load(from_row + columns, mask=live[:, None] & within, other=0.0)
    tl.store(out + row.to(tl.int64)[:, None] * hidden + columns, value, mask=inside[:, None] & within)


def sort_tile(num_experts: int) -> tuple[int, int]:
    """Return experts as a power of two, and tokens per tile: a tile has 4096 counters."""
    experts = max(triton.next_power_of_2(num_experts), 16)
    return experts, 4096 // experts


def launch(hidden_size: int, element_bytes: int, *, warp_size: int) -> Launch:
    """Choose the tile for rows of `hidden_size` elements.

    A lane has 32 bytes of a row, in two pieces of 16.
    """
    block = min(max(triton.next_power_of_2(hidden_size), 128), 4096 // element_bytes)
    rows = max(1, 8192 // (block * element_bytes))
    per_lane = 32 // element_bytes
    return Launch(rows, block, min(max(rows * block // (per_lane * warp_size), 1), 1024 // warp_size))


@functools.lru_cache(maxsize=256)
def _sort_plan(tokens: int, num_experts: int) -> tuple[int, int, dict]:
    """Return tiles per program, programs, and the keywords of both kernels."""
    experts, tile = sort_tile(num_experts)
    tiles = triton.cdiv(triton.cdiv(tokens, tile), PROGRAMS)
    return tiles, triton.cdiv(tokens, tiles * tile), {"EXPERTS": experts, "TILE": tile}


def sort_by_expert(expert_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As reference.sort_by_expert; num_experts up to 256."""
    tokens, device = expert_ids.shape[0], expert_ids.device
    token_of_row, row_of_token = (torch.empty(tokens, dtype=torch.int32, device=device) for _ in range(2))
    counts, offsets = (
        (torch.empty if tokens else torch.zeros)(num_experts, dtype=torch.int32, device=device) for _ in range(2)
    )
    if tokens:
        expert_ids = expert_ids.contiguous()
        tiles, programs, keywords = _sort_plan(tokens, num_experts)
        experts = keywords["EXPERTS"]
        counted = torch.empty((programs, experts), dtype=torch.int32, device=device)
        run_kernel(
            expert_count_kernel, (programs,), expert_ids, counted, tokens, num_experts, tiles, device=device, **keywords
        )
        run_kernel(
            expert_place_kernel, (programs,), expert_ids, counted, token_of_row, row_of_token, counts, offsets, tokens,
            num_experts, tiles, programs, ROWS=4096 // experts, device=device, **keywords,
        )
    return token_of_row, row_of_token, counts, offsets


def gather_rows(rows: Tensor, index: Tensor, inverse: Tensor, probs: Tensor | None) -> tuple[Tensor, Tensor]:
    """As reference.gather_rows."""
    count, hidden = rows.shape
    out, moved_probs = empty_results(rows, probs, like=rows)
    if hidden or probs is not None:
        rows, index = as_rows(rows), index.contiguous()
        grid, keywords = plan(launch, TILE_NAMES, (count, max(hidden, 1)), max(hidden, 1), rows.element_size())
        run_kernel(
            expert_gather_kernel, grid, rows, index, index if probs is None else probs.contiguous(), out,
            index if probs is None else moved_probs, count, hidden, rows.stride(0), HAS_SIDE=probs is not None,
            device=rows.device, **keywords,
        )
    return out, moved_probs
