# SPDX-License-Identifier: Apache-2.0
"""Host side of the CCA prologue in Triton: tiles, grids and the order of the launches. Same functions as hip_ops.reference.cca_prologue.

Head dimensions that are no power of two from 32 to 256 are computed by the torch reference. Importing this module imports triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.runtime.errors import OutOfResources

from hip_ops.reference import cca_prologue as reference
from hip_ops.triton_kernels.cca_prologue_backward import (
    cca_prologue_conv_kernel,
    cca_prologue_norm_kernel,
    cca_prologue_sum_kernel,
)
from hip_ops.triton_kernels.cca_prologue_forward import cca_prologue_forward_kernel
from hip_ops.triton_kernels.cca_prologue_rows import divisor

HEAD_DIMS = (32, 64, 128, 256)
CONSTEXPRS = ("HEADS", "GROUPS", "D", "ROTARY", "DELAYED", "HAS_ROPE", "HAS_HALO", "HAS_STARTS")  # of a call, in any kernel
SUM_COLUMNS = 8  # input channels a program of the sum kernel has
EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Launch:
    """block: rows of a tile. programs: of each head, or part of one; None for one a `tiles` tiles. registers: most a thread may have, None for no
    limit (NVIDIA alone). into: input channels a program of the convolutions' kernel has; zero_block: its rows of keys whose temperature is zero."""

    block: int
    num_warps: int
    programs: int | None = None
    tiles: int = 1
    stages: int = 1
    registers: int | None = None
    into: int = 128
    zero_block: int = 64

    @property
    def options(self) -> dict:
        return {"num_warps": self.num_warps} | ({"maxnreg": self.registers} if self.registers else {})


@lru_cache
def launch(kernel: str, d: int, heads: int, element_size: int, *, processors: int, warp_size: int | None = None) -> Launch:
    """Tile and grid of `kernel` - forward, norm or conv - for N = `heads` heads of d channels; warp_size None for this torch's device.

    The backward's programs stay resident and walk over tiles: weights are read, and partial sums written, once a program. fp32 (for
    checking; its products do not run on matrix units) has few rows: Triton writes such a product out, and takes a minute to compile many.
    """
    warp_size = warp_size or (32 if torch.version.hip is None else 64)
    nvidia = warp_size == 32
    exact, narrow = nvidia and element_size > 2, element_size > 2 or d > 128
    if kernel == "forward":
        return Launch(16, 8) if exact else Launch(64, 8) if nvidia and not narrow else Launch(32, 4, tiles=1 if nvidia else 4)
    if kernel == "norm":
        return Launch(32, 8 if nvidia else 4, max(1, processors * 3 // (heads + 1)))
    assert kernel == "conv", kernel
    into = min(d, 64) if nvidia and not narrow else 32
    programs = max(1, processors * into // (heads * d))
    if exact:
        return Launch(16, 8, programs, into=into, zero_block=16)
    if narrow or not nvidia:
        return Launch(32, 4, programs, into=into, zero_block=32 if nvidia else 16)
    return Launch(64, 8, programs, stages=3, into=into)


@lru_cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _programs(chosen: Launch, rows: int) -> int:
    """For `rows` flat rows, evenly loaded."""
    tiles = triton.cdiv(rows, chosen.block)
    if chosen.programs is None:
        return triton.cdiv(tiles, chosen.tiles)
    rounds = triton.cdiv(tiles, chosen.programs)
    return triton.cdiv(tiles, rounds)


def _by_rows(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _bytes(starts: Tensor | None, like: Tensor) -> Tensor:
    """bool as uint8; any pointer where there are no documents."""
    return like if starts is None else starts.contiguous().view(torch.uint8)


def _rope_strides(rope: Tensor | None) -> tuple[int, int]:
    return (0, 0) if rope is None else (rope.stride(0), rope.stride(1) if rope.shape[1] > 1 else 0)


@dataclass(frozen=True)
class Call:
    """The sizes of a call, and all that follows from them, made once: grids and what the kernels are compiled for."""

    s: int
    batch: int
    chunks: int
    constexprs: tuple[tuple[str, int], ...]
    element_size: int
    device: torch.device

    @classmethod
    def of(cls, projected: Tensor, grouped_weight: Tensor, rope, halo, value_halo, starts, groups: int, delayed: int) -> Call:
        d = grouped_weight.shape[1]
        chunks = next((len(t) for t in (halo, value_halo, starts) if t is not None), 1)
        values = (len(grouped_weight) // d - groups, groups, d, d if rope is None else rope.shape[-1], delayed)
        constexprs = zip(CONSTEXPRS, (*values, rope is not None, halo is not None, starts is not None), strict=True)
        return cls(*projected.shape[:2], chunks, tuple(constexprs), projected.element_size(), projected.device)


@dataclass(frozen=True)
class Plan:
    """sizes: total, rows, batch and both divisors, as the kernels take them; of each kernel grid and keywords; runs: of conv and of norm."""

    sizes: tuple[int, ...]
    grids: dict[str, tuple[int, int]]
    keywords: dict[str, dict]
    tiles: int
    early: tuple[int, int] = (0, 0)
    runs: tuple[int, int] = (0, 0)


@lru_cache(maxsize=256)
def _plan(call: Call, backward: bool, choose) -> Plan:
    """`choose` is `launch`: in the key, since benchmarks and tests put others in its place."""
    of = dict(call.constexprs)
    heads, d, rows, total = of["HEADS"] + of["GROUPS"], of["D"], call.s // call.chunks, call.s * call.batch
    chosen = {name: choose(name, d, heads, call.element_size, processors=_processors(call.device)) for name in (("norm", "conv") if backward else ("forward",))}
    sizes = (total, rows, call.batch, divisor(rows), divisor(call.batch))

    def keywords(kernel, each: Launch, stages: int, **more) -> dict:
        return {name: of[name] for name in kernel.arg_names if name in of} | {"BLOCK": each.block} | more | {"num_stages": stages} | each.options

    if not backward:
        each = chosen["forward"]
        return Plan(sizes, {"forward": (heads + 1, _programs(each, total))}, {"forward": keywords(cca_prologue_forward_kernel, each, each.stages)}, each.tiles)
    norm, conv = chosen["norm"], chosen["conv"]
    early_rows = 2 if of["HAS_HALO"] else 0
    early_total = (call.s + early_rows * call.chunks) * call.batch
    runs = _programs(conv, early_total), _programs(norm, total)
    grids = {
        "norm": (heads + 1, runs[1]), "conv": (heads * (d // conv.into) + of["GROUPS"], runs[0]), "sum": (heads, d // SUM_COLUMNS),
    }  # fmt: skip
    of_sum = {"COLUMNS": SUM_COLUMNS, "TOGETHER": 4, "RUNS": 32, "num_warps": 8}
    return Plan(
        sizes, grids, {
            "norm": keywords(cca_prologue_norm_kernel, norm, 1, STAGES=norm.stages),
            "conv": keywords(cca_prologue_conv_kernel, conv, conv.stages, IN=conv.into, ZERO_BLOCK=conv.zero_block,
                             OTHERS=triton.next_power_of_2(of["HEADS"] // of["GROUPS"])),  # fmt: skip
            "sum": {name: of[name] for name in cca_prologue_sum_kernel.arg_names if name in of} | of_sum,
        }, 1, (early_total, divisor(rows + early_rows)), runs,
    )  # fmt: skip


def _launch_with_fewer_stages(launch_kernel, keywords: dict, *arguments) -> None:
    """Three stages take all but 3 KB of an H100's shared memory; how much a device and a version of Triton need shows at the launch. `keywords` keeps what fitted."""
    while True:
        try:
            launch_kernel(*arguments, **keywords)
            return
        except OutOfResources:
            if keywords["num_stages"] == 1:
                raise
            keywords["num_stages"] -= 1


def cca_prologue(
    projected: Tensor, depthwise_weight: Tensor, depthwise_bias: Tensor, grouped_weight: Tensor, grouped_bias: Tensor,
    temperature: Tensor, rope: Tensor | None, halo: Tensor | None, value_halo: Tensor | None, starts: Tensor | None,
    query_groups: int, delayed_channels: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """As hip_ops.reference.cca_prologue.cca_prologue."""
    d, device = grouped_weight.shape[1], projected.device
    parameters = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, temperature)
    if d not in HEAD_DIMS:
        return reference.cca_prologue(
            projected, *parameters, rope, halo, value_halo, starts, query_groups, delayed_channels
        )  # fmt: skip
    s, b = projected.shape[:2]
    n = len(grouped_bias) // d
    query, key, value = (torch.empty((s, b, count, d), dtype=projected.dtype, device=device) for count in (n - query_groups, query_groups, query_groups))
    inverse_norm = torch.empty((n, s, b), dtype=torch.float32, device=device)
    if s * b:
        plan = _plan(Call.of(projected, grouped_weight, rope, halo, value_halo, starts, query_groups, delayed_channels), False, launch)
        projected = _by_rows(projected)
        rope = None if rope is None else _by_rows(rope)
        with torch.cuda.device(device):
            cca_prologue_forward_kernel[plan.grids["forward"]](
                projected, *(t.contiguous() for t in parameters), inverse_norm if rope is None else rope,
                *(projected if t is None else t.contiguous() for t in (halo, value_halo)),
                _bytes(starts, projected), query, key, value, inverse_norm, *plan.sizes, projected.stride(0), projected.stride(1),
                *_rope_strides(rope), plan.tiles, EPS, **plan.keywords["forward"],
            )  # fmt: skip
    return query, key, value, inverse_norm


def cca_prologue_backward(
    d_query: Tensor, d_key: Tensor, d_value: Tensor, projected: Tensor, depthwise_weight: Tensor, depthwise_bias: Tensor,
    grouped_weight: Tensor, grouped_bias: Tensor, temperature: Tensor, rope: Tensor | None, halo: Tensor | None,
    value_halo: Tensor | None, starts: Tensor | None, query: Tensor, key: Tensor, inverse_norm: Tensor, query_groups: int,
    delayed_channels: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """As hip_ops.reference.cca_prologue.cca_prologue_backward."""
    d, device, dtype = grouped_weight.shape[1], projected.device, projected.dtype
    parameters = (depthwise_weight, depthwise_bias, grouped_weight, grouped_bias, temperature)
    if d not in HEAD_DIMS:
        return reference.cca_prologue_backward(
            d_query, d_key, d_value, projected, *parameters, rope, halo, value_halo, starts, query, key, inverse_norm, query_groups,
            delayed_channels,
        )  # fmt: skip
    s, b = projected.shape[:2]
    given = (projected, *parameters, halo, value_halo)
    gradients = tuple(torch.empty(0 if t is None else t.shape, dtype=dtype if t is None else t.dtype, device=device) for t in given)
    if not s * b:
        return tuple(gradient.zero_() for gradient in gradients)
    plan = _plan(Call.of(projected, grouped_weight, rope, halo, value_halo, starts, query_groups, delayed_channels), True, launch)
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
    sizes = [-(-size // 4) * 4 for size in (runs * n * 3 * d * d, bias_runs * n * d, bias_runs * query_groups, runs * query_groups)]
    partial, partial_bias, partial_temperature, partial_zero = torch.empty(sum(sizes), dtype=torch.float32, device=device).split(sizes)
    strides = (projected.stride(0), projected.stride(1))
    with torch.cuda.device(device):
        cca_prologue_norm_kernel[plan.grids["norm"]](
            d_query, d_key, d_value, query, key, inverse_norm, parameters[-1], rope_or_any, flags, dy, d_projected, d_value_halo, partial_bias,
            partial_temperature, *plan.sizes, *d_query.stride()[:3], *d_key.stride()[:3], *d_value.stride()[:3], *rope_strides, 1.0 / EPS,
            **plan.keywords["norm"],
        )  # fmt: skip
        _launch_with_fewer_stages(
            cca_prologue_conv_kernel[plan.grids["conv"]], plan.keywords["conv"],
            dy, d_key, projected, *parameters, rope_or_any, halo_or_any, flags, d_projected, d_halo, partial, partial_zero, plan.sizes[0],
            plan.early[0], *plan.sizes[1:4], plan.early[1], plan.sizes[4], *strides, *d_key.stride()[:3], *rope_strides, EPS,
        )  # fmt: skip
        cca_prologue_sum_kernel[plan.grids["sum"]](
            partial, partial_bias, partial_temperature, partial_zero, *parameters[:3], parameters[-1], *d_parameters, runs, bias_runs,
            **plan.keywords["sum"],
        )  # fmt: skip
    return gradients
