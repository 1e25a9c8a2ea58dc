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

from hip_ops.reference import cca_prologue as reference
from hip_ops.triton_kernels.cca_prologue_backward import (
    input_kernel,
    norm_kernel,
    sum_kernel,
    temperature_kernel,
    weight_kernel,
)
from hip_ops.triton_kernels.cca_prologue_forward import forward_kernel

HEAD_DIMS = (32, 64, 128, 256)
CONSTEXPRS = ("HEADS", "GROUPS", "D", "ROTARY", "DELAYED", "HAS_ROPE", "HAS_HALO", "HAS_STARTS")  # of a call, in any kernel
SUM_COLUMNS = 8  # input channels a program of the sum kernel has


@dataclass(frozen=True)
class Launch:
    """block: rows of a tile. programs: of each head; None for one a `tiles` tiles. registers: most a thread may have, None for no limit (NVIDIA
    alone). out: output channels a program of the weight kernel has."""

    block: int
    num_warps: int
    programs: int | None = None
    tiles: int = 1
    stages: int = 1
    registers: int | None = None
    out: int = 128

    @property
    def options(self) -> dict:
        return {"num_warps": self.num_warps} | ({"maxnreg": self.registers} if self.registers else {})


@lru_cache
def launch(kernel: str, d: int, heads: int, element_size: int, *, processors: int, warp_size: int | None = None) -> Launch:
    """Tile and grid of `kernel` - forward, norm, input, weight or temperature - for N = `heads` heads of d channels; warp_size None for this torch's device.

    The backward's programs stay resident and walk over tiles: weights are read, and partial sums written, once a program. fp32 (for
    checking; its products do not run on matrix units) has half the rows, for the same bytes in shared memory.
    """
    warp_size = warp_size or (32 if torch.version.hip is None else 64)
    nvidia = warp_size == 32
    narrow = element_size > 2 or d > 128
    if kernel == "forward":
        return Launch(64, 8) if nvidia and not narrow else Launch(32, 4, tiles=1 if nvidia else 4)
    if kernel == "temperature":
        return Launch(64, 8) if nvidia and not narrow else Launch(32 if nvidia else 16, 4)
    if kernel == "norm":
        return Launch(32, 8 if nvidia else 4, max(1, processors * 3 // (heads + 1)))
    if kernel == "input":
        return Launch(32 if narrow else 64, 8 if nvidia and not narrow else 4, max(1, processors // heads))
    assert kernel == "weight", kernel
    out = 32 if narrow else min(d, 64)
    resident = 1 if narrow else 2
    return Launch(32, 4, max(1, processors * resident * out // (heads * d)), stages=3 if nvidia and not narrow else 1, out=out)


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


@lru_cache
def _constexprs_of(kernel) -> tuple[str, ...]:
    return tuple(name for name in kernel.arg_names if name in CONSTEXPRS)


@dataclass(frozen=True)
class Shape:
    """What the kernels are compiled for, and the sizes of a call."""

    rows: int  # of a chunk
    batch: int
    total: int
    constexprs: dict

    @classmethod
    def of(cls, projected: Tensor, grouped_weight: Tensor, rope, halo, value_halo, starts, groups: int, delayed: int) -> Shape:
        d = grouped_weight.shape[1]
        s, b = projected.shape[:2]
        chunks = next((len(t) for t in (halo, value_halo, starts) if t is not None), 1)
        values = (len(grouped_weight) // d - groups, groups, d, d if rope is None else rope.shape[-1], delayed)
        constexprs = dict(zip(CONSTEXPRS, (*values, rope is not None, halo is not None, starts is not None), strict=True))
        return cls(s // chunks, b, s * b, constexprs)

    @property
    def heads(self) -> int:
        return self.constexprs["HEADS"] + self.constexprs["GROUPS"]

    def of_kernel(self, kernel, **more) -> dict:
        return {name: self.constexprs[name] for name in _constexprs_of(kernel)} | more


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
    shape = Shape.of(projected, grouped_weight, rope, halo, value_halo, starts, query_groups, delayed_channels)
    s, b = projected.shape[:2]
    sizes = (shape.heads - query_groups, query_groups, query_groups)
    query, key, value = (torch.empty((s, b, count, d), dtype=projected.dtype, device=device) for count in sizes)
    inverse_norm = torch.empty((shape.heads, s, b), dtype=torch.float32, device=device)
    if shape.total:
        projected = _by_rows(projected)
        rope = None if rope is None else _by_rows(rope)
        chosen = launch("forward", d, shape.heads, projected.element_size(), processors=_processors(device))
        with torch.cuda.device(device):
            forward_kernel[(shape.heads + 1, _programs(chosen, shape.total))](
                projected, *(t.contiguous() for t in parameters), inverse_norm if rope is None else rope,
                *(projected if t is None else t.contiguous() for t in (halo, value_halo)),
                _bytes(starts, projected), query, key, value, inverse_norm, shape.total, shape.rows, b, projected.stride(0),
                projected.stride(1), *_rope_strides(rope), chosen.tiles, torch.finfo(torch.float32).eps,
                **shape.of_kernel(forward_kernel, BLOCK=chosen.block), num_stages=chosen.stages, **chosen.options,
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
    shape = Shape.of(projected, grouped_weight, rope, halo, value_halo, starts, query_groups, delayed_channels)
    s, b = projected.shape[:2]
    given = (projected, *parameters, halo, value_halo)
    gradients = tuple(torch.empty(0 if t is None else t.shape, dtype=(projected if t is None else t).dtype, device=device) for t in given)
    if not shape.total:
        return tuple(gradient.zero_() for gradient in gradients)
    d_projected, *d_parameters, d_halo, d_value_halo = gradients
    d_query, d_key, d_value, projected = map(_by_rows, (d_query, d_key, d_value, projected))
    query, key = query.contiguous(), key.contiguous()
    parameters = tuple(tensor.contiguous() for tensor in parameters)
    no_rope = inverse_norm if rope is None else _by_rows(rope)
    halo_or_any = projected if halo is None else halo.contiguous()
    rope_strides, flags = _rope_strides(rope), _bytes(starts, projected)
    processors = _processors(device)
    chosen = {name: launch(name, d, shape.heads, projected.element_size(), processors=processors) for name in ("norm", "input", "weight")}
    runs = {name: _programs(each, shape.total) for name, each in chosen.items()}
    input_total = shape.total + (0 if halo is None else 2 * (shape.total // shape.rows))
    zero = launch("temperature", d, shape.heads, projected.element_size(), processors=processors)
    zero_runs = min(triton.cdiv(shape.total, zero.block), 64)
    dy = torch.empty((s, b, shape.heads * d), dtype=dtype, device=device)
    sizes = (runs["weight"] * shape.heads * 3 * d * d, runs["norm"] * shape.heads * d, runs["norm"] * query_groups, zero_runs * query_groups)
    sums = torch.empty(sum(-(-size // 4) * 4 for size in sizes), dtype=torch.float32, device=device)
    partial, partial_bias, partial_temperature, partial_zero, _ = sums.split([-(-size // 4) * 4 for size in sizes] + [0])
    with torch.cuda.device(device):
        norm_kernel[(shape.heads + 1, runs["norm"])](
            d_query, d_key, d_value, query, key, inverse_norm, parameters[-1], no_rope, flags, dy, d_projected, d_value_halo, partial_bias,
            partial_temperature, shape.total, shape.rows, b, *d_query.stride()[:3], *d_key.stride()[:3], *d_value.stride()[:3],
            *rope_strides, 1.0 / torch.finfo(torch.float32).eps, **shape.of_kernel(norm_kernel, BLOCK=chosen["norm"].block, STAGES=chosen["norm"].stages),
            **chosen["norm"].options,
        )  # fmt: skip
        input_kernel[(shape.heads, _programs(chosen["input"], input_total))](
            dy, parameters[0], parameters[2], flags, d_projected, d_halo, input_total, shape.rows, b,
            **shape.of_kernel(input_kernel, BLOCK=chosen["input"].block), num_stages=chosen["input"].stages,
            **chosen["input"].options,
        )  # fmt: skip
        weight_kernel[(shape.heads * (d // chosen["weight"].out), runs["weight"])](
            dy, projected, halo_or_any, flags, partial, shape.total, shape.rows, b, projected.stride(0), projected.stride(1),
            **shape.of_kernel(weight_kernel, BLOCK=chosen["weight"].block, OUT=chosen["weight"].out),
            num_stages=chosen["weight"].stages, **chosen["weight"].options,
        )  # fmt: skip
        temperature_kernel[(query_groups, zero_runs)](
            d_key, projected, *parameters, no_rope, halo_or_any, flags, partial_zero, shape.total, shape.rows, b, projected.stride(0),
            projected.stride(1), *d_key.stride()[:3], *rope_strides, torch.finfo(torch.float32).eps,
            **shape.of_kernel(temperature_kernel, BLOCK=zero.block), **zero.options,
        )  # fmt: skip
        sum_kernel[(shape.heads, d // SUM_COLUMNS)](
            partial, partial_bias, partial_temperature, partial_zero, *parameters[:3], parameters[-1], *d_parameters, runs["weight"],
            runs["norm"], zero_runs, **shape.of_kernel(sum_kernel, COLUMNS=SUM_COLUMNS, RUNS=32), num_warps=4,
        )  # fmt: skip
    return gradients
