# SPDX-License-Identifier: Apache-2.0
"""Host side of the CCA prologue in Triton: tiles, grids and the order of the launches. Same functions as
reference.py.

The kernels take head dimensions that are powers of two from 32 to 256, of which the rotating channels are a divisor
(`fits`). Importing this module imports triton.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor
from triton import next_power_of_2
from triton.runtime.errors import OutOfResources

from hip_ops.ops.cca_prologue.reference import chunk_count
from hip_ops.ops.cca_prologue.triton_backward import (
    cca_prologue_input_kernel,
    cca_prologue_norm_kernel,
    cca_prologue_sum_kernel,
    cca_prologue_weight_kernel,
)
from hip_ops.ops.cca_prologue.triton_forward import cca_prologue_forward_kernel, cca_prologue_taps_kernel
from hip_ops.ops.cca_prologue.triton_rows import divisor
from hip_ops.runtime.launch import WARP_SIZE, Launch, empty_results, multiprocessors, on, run_kernel

# the values of a call that every kernel is compiled for
CONSTEXPRS = ("HEADS", "GROUPS", "D", "ROTARY", "DELAYED", "HAS_ROPE", "HAS_HALO", "HAS_STARTS")
TAPS_ROWS = 16  # of a head's taps, a program
# of the sum kernel: input channels per program, and partial sums in flight
SUM_KEYWORDS = {"COLUMNS": 8, "TOGETHER": 8, "RUNS": 64}
EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class HeadLaunch(Launch):
    """columns: channels per program. zero_rows: of a tile of keys with temperature zero, in the weights' kernel.
    inputs: input channels of a product with taps at a time, None: all. The launch reduces stages to what shared memory
    holds.
    """

    zero_rows: int = 64
    inputs: int | None = None

    def over_heads(self, rows: int, heads: int, groups: int) -> tuple[int, tuple[int]]:
        """Return a query head's runs and the grid. A key head's tile takes longer, by a twelfth for each query head of
        its group (by instructions), so that it gets more programs.
        """
        runs = max(1, int(self.programs / (heads + groups + heads / 12)))
        of_key = max(1, (self.programs - runs * heads) // groups)
        runs, of_key = (replace(self, programs=programs).grid(rows)[0] for programs in (runs, of_key))
        return runs, (heads * runs + groups * of_key,)


@lru_cache
def launch(
    kernel: str, d: int, heads: int, element_size: int, *, processors: int, warp_size: int
) -> HeadLaunch:
    """Choose tile and grid of `kernel` - forward, norm, input or weight - for N = `heads` heads of d channels.

    Programs stay resident and loop over tiles: weights are read, and partial sums written, once per program. fp32 (for
    checks; its products do not run on matrix units) has few rows, because Triton unrolls such a product and compiles
    many rows for a minute.
    """
    nvidia = warp_size == 32
    exact, narrow = nvidia and element_size > 2, element_size > 2 or d > 128
    inputs = 32 if narrow else None  # all taps would not fit into shared memory

    if kernel == "norm":
        return HeadLaunch(32, d, 8 if nvidia else 4, max(1, processors * 3 // (heads + 1)))
    if kernel in ("forward", "input"):
        if exact:
            return HeadLaunch(16, d, 8, processors, inputs=inputs)
        if nvidia and not narrow:
            return HeadLaunch(64, d, 4, processors, stages=2)  # four warps: see `halves`
        return HeadLaunch(32, d, 4, processors * (1 if nvidia else 2), inputs=inputs)
    assert kernel == "weight", kernel

    def programs(resident: int, part: int = d) -> int:
        return max(1, processors * resident * part // (heads * d))

    if exact:
        return HeadLaunch(16, 32, 8, programs(1, 32), zero_rows=16, inputs=32)
    if nvidia and not narrow:
        return HeadLaunch(32, d, 8, programs(1), stages=3, inputs=32)
    part = 32 if narrow else min(d, 64)
    return HeadLaunch(32, part, 4, programs(1 if narrow else 2, part), zero_rows=32 if nvidia else 16, inputs=32)


def _by_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _bytes(starts: Tensor | None, like: Tensor) -> Tensor:
    """Return bool as uint8, or any pointer where there are no documents."""
    return like if starts is None else starts.contiguous().view(torch.uint8)


def _rope_strides(rope: Tensor | None) -> tuple[int, int]:
    return (0, 0) if rope is None else (rope.stride(0), rope.stride(1) if rope.shape[1] > 1 else 0)


@dataclass(frozen=True)
class Plan:
    """Grid and keywords of each kernel.

    sizes: total, rows, batch and both divisors, as the kernels take them. early: total and divisor including the rows
        of halo.
    runs: of the weights' kernel and of norm. query_runs: of a query head, in the forward or the input's kernel.
    """

    sizes: tuple[int, ...]
    grids: dict[str, tuple[int, ...]]
    keywords: dict[str, dict]
    query_runs: int
    early: tuple[int, int] = (0, 0)
    runs: tuple[int, int] = (0, 0)


@lru_cache(maxsize=256)
def _plan(
    choose: Callable[..., HeadLaunch], backward: bool, s: int, batch: int, chunks: int,
    constexprs: tuple[tuple[str, int], ...], element_size: int, device: torch.device,
) -> Plan:
    """Return the plan of a call. choose: `launch`; it is part of the key because benchmarks and tests replace it."""
    of = dict(constexprs)
    heads, d, rows, total = of["HEADS"] + of["GROUPS"], of["D"], s // chunks, s * batch
    names = ("norm", "input", "weight") if backward else ("forward",)
    chosen = {
        name: choose(name, d, heads, element_size, processors=multiprocessors(device), warp_size=WARP_SIZE)
        for name in names
    }
    sizes = (total, rows, batch, divisor(rows), divisor(batch))

    def keywords(kernel, tile: HeadLaunch, stages: int, **more) -> dict:
        return (
            {name: of[name] for name in kernel.arg_names if name in of}
            | {"BLOCK": tile.rows}
            | more
            | {"num_stages": stages}
            | tile.options
        )

    taps = (heads, d // TAPS_ROWS, 2 if backward else 1)
    if not backward:
        tile = chosen["forward"]
        query_runs, grid = tile.over_heads(total, of["HEADS"], of["GROUPS"])
        of_forward = keywords(
            cca_prologue_forward_kernel,
            tile,
            tile.stages,
            INPUTS=tile.inputs or d,
            STAGES=tile.stages,
            VALUES=next_power_of_2(-(-of["GROUPS"] * d // of["HEADS"])),
        )
        return Plan(sizes, {"taps": taps, "forward": grid}, {"forward": of_forward}, query_runs)
    norm, to_input, weight = (chosen[name] for name in names)
    early_rows = 2 if of["HAS_HALO"] else 0
    early_total = (s + early_rows * chunks) * batch
    query_runs, grid = to_input.over_heads(early_total, of["HEADS"], of["GROUPS"])
    runs = weight.grid(total) + norm.grid(total)
    return Plan(
        sizes,
        {
            "taps": taps,
            "norm": (heads + 1, runs[1]),
            "input": grid,
            "weight": (heads * (d // weight.columns) + of["GROUPS"], runs[0]),
            "sum": (heads, d // SUM_KEYWORDS["COLUMNS"]),
        },
        {
            "norm": keywords(cca_prologue_norm_kernel, norm, 1, STAGES=norm.stages),
            "input": keywords(
                cca_prologue_input_kernel,
                to_input,
                to_input.stages,
                INPUTS=to_input.inputs or d,
                STAGES=to_input.stages,
            ),
            "weight": keywords(
                cca_prologue_weight_kernel,
                weight,
                weight.stages,
                OUT=weight.columns,
                ZERO_BLOCK=weight.zero_rows,
                INPUTS=weight.inputs or d,
            ),
            "sum": {name: of[name] for name in cca_prologue_sum_kernel.arg_names if name in of}
            | SUM_KEYWORDS
            | {"num_warps": 8},
        },
        query_runs,
        (early_total, divisor(rows + early_rows)),
        runs,
    )


def _plan_for(
    backward: bool, projected: Tensor, grouped_weight: Tensor, rope: Tensor | None, halo: Tensor | None,
    value_halo: Tensor | None, starts: Tensor | None, groups: int, delayed: int,
) -> Plan:
    d = grouped_weight.shape[1]
    values = (len(grouped_weight) // d - groups, groups, d, d if rope is None else rope.shape[-1], delayed)
    constexprs = zip(CONSTEXPRS, (*values, rope is not None, halo is not None, starts is not None), strict=True)
    chunks = chunk_count(halo, value_halo, starts)
    return _plan(
        launch, backward, *projected.shape[:2], chunks, tuple(constexprs), projected.element_size(), projected.device
    )


def _launch_with_fewer_stages(launch_kernel, keywords: dict, *arguments) -> None:
    """Launch with fewer stages until the kernel fits into shared memory, which only a launch shows. `keywords` keeps
    the result.
    """
    while True:
        try:
            launch_kernel(*arguments, **keywords)
            return
        except OutOfResources:
            if keywords["num_stages"] == 1:
                raise
            keywords |= {name: keywords["num_stages"] - 1 for name in ("num_stages", "STAGES") if name in keywords}


def _merged_taps(weights: tuple[Tensor, ...], plan: Plan, rotary: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the taps [1 or 2, N, 3, d, d] and the constant part [N, d] of the four convolution tensors."""
    heads, _, passes = plan.grids["taps"]
    d = weights[2].shape[1]
    taps = torch.empty((passes, heads, 3, d, d), dtype=weights[0].dtype, device=device)
    constant = torch.empty((heads, d), dtype=torch.float32, device=device)
    run_kernel(
        cca_prologue_taps_kernel, plan.grids["taps"], *weights, taps, constant, D=d, ROTARY=rotary, ROWS=TAPS_ROWS,
        num_warps=8, device=device,
    )
    return taps, constant


def cca_prologue(
    projected: Tensor, depthwise_weight: Tensor, depthwise_bias: Tensor, grouped_weight: Tensor, grouped_bias: Tensor,
    temperature: Tensor, rope: Tensor | None, halo: Tensor | None, value_halo: Tensor | None, starts: Tensor | None,
    query_groups: int, delayed_channels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As reference.cca_prologue."""
    d, device = grouped_weight.shape[1], projected.device
    parameters = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, temperature)
    s, b = projected.shape[:2]
    n = len(grouped_bias) // d
    query, key, value = (
        torch.empty((s, b, count, d), dtype=projected.dtype, device=device)
        for count in (n - query_groups, query_groups, query_groups)
    )
    inverse_norm = torch.empty((n, s, b), dtype=torch.float32, device=device)
    if s * b:
        plan = _plan_for(
            False, projected, grouped_weight, rope, halo, value_halo, starts, query_groups, delayed_channels
        )
        projected = _by_rows(projected)
        rope = None if rope is None else _by_rows(rope)
        *weights, length = (t.contiguous() for t in parameters)
        merged = _merged_taps(weights, plan, d if rope is None else rope.shape[-1], device)
        with on(device):
            _launch_with_fewer_stages(
                cca_prologue_forward_kernel[plan.grids["forward"]], plan.keywords["forward"],
                projected, *merged, length, inverse_norm if rope is None else rope,
                *(projected if t is None else t.contiguous() for t in (halo, value_halo)), _bytes(starts, projected),
                query, key, value, inverse_norm, *plan.sizes, plan.query_runs, projected.stride(0), projected.stride(1),
                *_rope_strides(rope), EPS,
            )
    return query, key, value, inverse_norm


def cca_prologue_backward(
    d_query: Tensor, d_key: Tensor, d_value: Tensor, projected: Tensor, depthwise_weight: Tensor,
    depthwise_bias: Tensor, grouped_weight: Tensor, grouped_bias: Tensor, temperature: Tensor, rope: Tensor | None,
    halo: Tensor | None, value_halo: Tensor | None, starts: Tensor | None, query: Tensor, key: Tensor,
    inverse_norm: Tensor, query_groups: int, delayed_channels: int,
) -> tuple[Tensor, ...]:
    """As reference.cca_prologue_backward."""
    d, device, dtype = grouped_weight.shape[1], projected.device, projected.dtype
    parameters = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, temperature)
    s, b = projected.shape[:2]
    inputs = (projected, *parameters, halo, value_halo)
    gradients = tuple(empty_results(*inputs, like=projected))
    if not s * b:
        return tuple(gradient.zero_() for gradient in gradients)
    plan = _plan_for(True, projected, grouped_weight, rope, halo, value_halo, starts, query_groups, delayed_channels)
    d_projected, *d_parameters, d_halo, d_value_halo = gradients
    d_query, d_key, d_value, projected = map(_by_rows, (d_query, d_key, d_value, projected))
    query, key = query.contiguous(), key.contiguous()
    parameters = tuple(tensor.contiguous() for tensor in parameters)
    rope = None if rope is None else _by_rows(rope)
    rope_or_any = inverse_norm if rope is None else rope
    halo_or_any = projected if halo is None else halo.contiguous()
    rope_strides, flags = _rope_strides(rope), _bytes(starts, projected)
    n, (runs, bias_runs) = len(grouped_bias) // d, plan.runs
    dy = torch.empty((s, b, n * d), dtype=dtype, device=device)
    sizes = [
        -(-size // 4) * 4
        for size in (runs * n * 3 * d * d, bias_runs * n * d, bias_runs * query_groups, runs * query_groups)
    ]
    partial, partial_bias, partial_temperature, partial_zero = torch.empty(
        sum(sizes), dtype=torch.float32, device=device
    ).split(sizes)
    taps, constant = _merged_taps(parameters[:4], plan, d if rope is None else rope.shape[-1], device)
    with on(device):
        cca_prologue_norm_kernel[plan.grids["norm"]](
            d_query, d_key, d_value, query, key, inverse_norm, parameters[-1], rope_or_any, flags, dy, d_projected,
            d_value_halo, partial_bias, partial_temperature, *plan.sizes, *d_query.stride()[:3], *d_key.stride()[:3],
            *d_value.stride()[:3], *rope_strides, 1.0 / EPS, **plan.keywords["norm"],
        )
        _launch_with_fewer_stages(
            cca_prologue_input_kernel[plan.grids["input"]], plan.keywords["input"],
            dy, taps[1], flags, d_projected, d_halo, plan.early[0], *plan.sizes[1:3], plan.early[1], plan.sizes[4],
            plan.query_runs,
        )
        _launch_with_fewer_stages(
            cca_prologue_weight_kernel[plan.grids["weight"]], plan.keywords["weight"],
            dy, d_key, projected, taps, constant, parameters[-1], rope_or_any, halo_or_any, flags, partial,
            partial_zero, *plan.sizes,
            projected.stride(0), projected.stride(1), *d_key.stride()[:3], *rope_strides, EPS,
        )
        cca_prologue_sum_kernel[plan.grids["sum"]](
            partial, partial_bias, partial_temperature, partial_zero, *parameters[:3], parameters[-1], *d_parameters,
            runs, bias_runs, **plan.keywords["sum"],
        )
    return gradients
