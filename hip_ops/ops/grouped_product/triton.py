# SPDX-License-Identifier: Apache-2.0
"""Launches the grouped products in Triton (triton_kernels.py): by tensor descriptors where the device and the operands
allow it, otherwise by the pointer kernels.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hip_ops.ops.grouped_product.configs import GroupedConfig, choose_config
from hip_ops.runtime.code_objects import launch_triton_kernel
from hip_ops.runtime.launch import XCDS, architecture, describable, multiprocessors, on


@functools.cache
def table_part(device: torch.device) -> str:
    """Return the key of the table for a device; a CPU, where Triton's interpreter runs, counts as Hopper."""
    return "sm_90" if device.type == "cpu" else architecture(device)


def _programs(device: torch.device, config: GroupedConfig, most_tiles: int) -> int:
    """Return the programs of the grid: at most as many as tiles; one per tile for config.programs == 0."""
    if config.programs == 0:
        return max(most_tiles, 1)
    return max(1, min(most_tiles, config.programs * (4 if device.type == "cpu" else multiprocessors(device))))


@dataclass(frozen=True)
class Plan:
    """The values that a call's sizes determine. keywords: of every kernel."""

    config: GroupedConfig
    programs: int
    keywords: dict


@functools.lru_cache(maxsize=1024)
def _plan(
    device: torch.device, kind: str, tokens: int, experts: int, k: int, n: int, config: GroupedConfig, described: bool
) -> Plan:
    """Compute the plan of a call. k and n: the sides of a matrix; for "outer" m and n of the result."""
    if config.descriptors and not described:
        config = replace(config, descriptors=False, flatten=False)
    if kind == "outer":
        rows = experts * math.ceil(k / config.block_m)
    else:
        rows = math.ceil(tokens / config.block_m) + experts
    keywords = _constants(experts, config) | config.launch_options()
    return Plan(config, _programs(device, config, rows * math.ceil(n / config.block_n)), keywords)


def _plan_for(
    kind: str, tokens: int, experts: int, k: int, n: int, config: GroupedConfig | None, tensors: tuple[Tensor, ...]
) -> Plan:
    device = tensors[0].device
    config = config or choose_config(table_part(device), kind, tokens // experts, k, n, experts)
    return _plan(device, kind, tokens, experts, k, n, config, config.descriptors and all(map(describable, tensors)))


def grouped_rows(x: Tensor, matrices: Tensor, offsets: Tensor, config: GroupedConfig | None = None) -> Tensor:
    """As reference.grouped_rows, but padding rows are not written.

    matrices may be a transposed view.
    """
    (experts, k, n), tokens, device = matrices.shape, x.shape[0], x.device
    out = torch.empty((tokens, n), dtype=x.dtype, device=device)
    if not (tokens and n and k and experts):
        return out.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    transposed = matrices.stride(2) != 1
    stored = matrices.mT if transposed else matrices
    stored = stored if stored.stride(2) == 1 else stored.contiguous()
    plan = _plan_for("rows_t" if transposed else "rows", tokens, experts, k, n, config, (x, stored, out))
    config, offsets = plan.config, offsets.contiguous()
    if not config.descriptors:
        launch_triton_kernel(
            "grouped_product", "grouped_pointer_rows_kernel", (plan.programs,), x, stored, out, offsets, experts, n, k,
            x.stride(0), stored.stride(0), stored.stride(1), TRANSPOSED=transposed, EVEN_K=k % config.block_k == 0,
            XCDS=XCDS, device=device, **plan.keywords,
        )
        return out
    from hip_ops.ops.grouped_product.expert_tiles import ragged_rows  # imports triton
    from hip_ops.runtime.descriptors import descriptor

    matrix = (1, config.block_n, config.block_k) if transposed else (1, config.block_k, config.block_n)
    with on(device):
        launch_triton_kernel(
            "grouped_product", "grouped_rows_kernel", (plan.programs,),
            descriptor(x, x.shape, x.stride(), (config.block_m, config.block_k)),
            descriptor(stored, stored.shape, stored.stride(), matrix),
            ragged_rows(out, (config.block_m, config.block_n // config.parts)), offsets, experts, n, k,
            TRANSPOSED=transposed, FLATTEN=config.flatten, PARTS=config.parts, device=device, **plan.keywords,
        )
    return out


def grouped_outer_(
    out: Tensor, a: Tensor, b: Tensor, offsets: Tensor, accumulate: bool, config: GroupedConfig | None = None
) -> None:
    """As reference.grouped_outer_."""
    (experts, m, n), tokens = out.shape, a.shape[0]
    if not (experts and m and n):
        return
    if not tokens:
        return None if accumulate else out.zero_()
    a, b = a if a.stride(1) == 1 else a.contiguous(), b if b.stride(1) == 1 else b.contiguous()
    plan = _plan_for("outer", tokens, experts, m, n, config, (a, b, out))
    config, offsets = plan.config, offsets.contiguous()
    if not config.descriptors:
        launch_triton_kernel(
            "grouped_product", "grouped_pointer_outer_kernel", (plan.programs,), a, b, out, offsets, experts, m, n, a.stride(0),
            b.stride(0), out.stride(0), out.stride(1), ACCUMULATE=accumulate, XCDS=XCDS, device=a.device,
            **plan.keywords,
        )
        return
    from hip_ops.ops.grouped_product.expert_tiles import ragged_rows  # imports triton
    from hip_ops.runtime.descriptors import descriptor

    with on(a.device):
        launch_triton_kernel(
            "grouped_product", "grouped_outer_kernel", (plan.programs,),
            ragged_rows(a, (config.block_k, config.block_m)), ragged_rows(b, (config.block_k, config.block_n)),
            descriptor(out, out.shape, out.stride(), (1, config.block_m, config.block_n // config.parts)), offsets,
            experts, m, n, ACCUMULATE=accumulate, REDUCE=config.reduce and out.dtype == torch.float32,
            PARTS=config.parts, device=a.device, **plan.keywords,
        )


def _constants(experts: int, config: GroupedConfig) -> dict:
    return dict(
        EXPERTS=1 << (experts - 1).bit_length(), BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k,
        GROUP=config.group,
    )
