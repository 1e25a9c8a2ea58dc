# SPDX-License-Identifier: Apache-2.0
"""Runs gfx942 code objects of the expert path, HIP's and Triton's, in the emulator, with the functions that
expert_path_cases checks.

The launchers of csrc/ choose kernel, grid and block on a GPU; this file makes the same choice once more, in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hip_ops.runtime.launch import ROWS_A_BLOCK
from tests.gfx942.emulator import Buffer, Counters, Device
from tests.gfx942.toolchain import code_object
from tests.gfx942.triton_objects import triton_code_object
from tests.hip_ops.expert_path_cases import BF16, FP32

SHORT = {BF16: "bf16", FP32: "fp32"}
NUMPY = {BF16: np.uint16, FP32: np.float32, torch.int32: np.int32, torch.int64: np.int64}
TYPES = {BF16: "*bf16", FP32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}


def to_numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.contiguous()
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == BF16 else tensor.numpy()


def to_torch(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.view(np.int16)).view(BF16) if array.dtype == np.uint16 else torch.from_numpy(array)


@dataclass
class OnDevice:
    """`counters` collects what each launch counted, by kernel."""

    device: Device = field(default_factory=Device)
    counters: dict[str, Counters] = field(default_factory=dict)

    def put(self, tensor: Tensor | None) -> Buffer | None:
        return None if tensor is None else self.device.put(to_numpy(tensor))

    def rows(self, tensor: Tensor) -> Buffer:
        """The storage of strided rows as it lies, without what follows the last row's end."""
        return self.device.put(
            to_numpy(tensor.as_strided((max(0, (len(tensor) - 1) * tensor.stride(0) + tensor.shape[1]),), (1,)))
        )

    def out(self, shape, dtype: torch.dtype) -> Buffer:
        return self.device.alloc(shape, NUMPY[dtype])

    def sort_results(self, tokens: int, experts: int) -> list[Buffer]:
        return [self.out((n,), torch.int32) for n in (tokens, tokens, experts, experts)]


@dataclass
class HipOnDevice(OnDevice):
    """`blocks`: the largest number of the kernels on rows. `objects` compiles a source of csrc/ by name."""

    blocks: int = 2
    objects: Callable[[str], Path] = code_object

    def launch(self, source: str, kernel: str, blocks: int, threads: int, arguments: list) -> None:
        self.counters[kernel] = self.device.launch(self.objects(source), kernel, blocks, threads, arguments)

    def launch_rows(self, source: str, kernel: str, rows: int, arguments: list) -> None:
        if rows:
            self.launch(source, kernel, min(self.blocks, -(-rows // ROWS_A_BLOCK)), 256, arguments)

    def sort_by_expert(self, ids: Tensor, experts: int) -> tuple[Tensor, ...]:
        few, tokens = experts <= 32, len(ids)
        variant, threads = (32, 256) if few else (256, 64)
        share = min(128, max(1, -(-tokens // (64 * threads))))
        blocks = -(-tokens // (threads * share))
        counted, results, given = (
            self.out((blocks, experts + 1), torch.int32),
            self.sort_results(tokens, experts),
            self.put(ids),
        )
        wide = np.int32(ids.dtype == torch.int64)
        sizes = [np.int64(tokens), np.int32(share), np.int32(experts)]
        self.launch("expert_sort", f"ho_expert_count_{variant}", blocks, threads, [given, wide, counted, *sizes])
        self.launch(
            "expert_sort", f"ho_expert_place_{variant}", blocks, threads, [given, wide, counted, *results, *sizes]
        )
        return tuple(to_torch(r.read()) for r in results)

    def aligned(self, *tensors: Tensor) -> bool:
        return all(
            t.stride(0) * t.element_size() % 16 == 0 and t.shape[1] * t.element_size() % 16 == 0 for t in tensors
        )

    def gather_rows(self, source: Tensor, index: Tensor, inverse: Tensor, side: Tensor | None) -> tuple[Tensor, Tensor]:
        (count, hidden), size = source.shape, source.element_size()
        out = self.out((count, hidden), source.dtype)
        side_out = self.out((count,) if side is not None else (0,), source.dtype if side is None else side.dtype)
        aligned = self.aligned(source)
        words = 4 // size if aligned else 1
        suffix = "16" if aligned else str(size)
        self.launch_rows(
            "expert_rows",
            f"ho_gather_rows_{suffix}",
            count,
            [
                self.rows(source),
                self.put(index),
                self.put(side),
                out,
                None if side is None else side_out,
                np.int64(count),
                np.int32(hidden // words),
                np.int64(source.stride(0) // words),
                np.int32(0 if side is None else side.element_size()),
            ],
        )
        return to_torch(out.read()), to_torch(side_out.read())

    def weighted_swiglu(self, gate_up: Tensor, probs: Tensor, offsets: Tensor | None) -> Tensor:
        count, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = self.out((count, width), gate_up.dtype)
        name = f"ho_weighted_swiglu_{'' if self.aligned(gate_up[:, :width]) else 'any_'}{SHORT[gate_up.dtype]}"
        self.launch_rows(
            "weighted_swiglu",
            name,
            count,
            [
                self.rows(gate_up),
                self.put(probs),
                self.put(offsets),
                out,
                np.int64(count),
                np.int32(width),
                np.int64(gate_up.stride(0)),
                np.int32(0 if offsets is None else len(offsets)),
                np.int32(probs.dtype == BF16),
            ],
        )
        return to_torch(out.read())

    def weighted_swiglu_backward(
        self, grad: Tensor, gate_up: Tensor, probs: Tensor, offsets: Tensor | None, with_output: bool
    ):
        count, width = grad.shape
        d_gate_up, d_probs = self.out((count, 2 * width), gate_up.dtype), self.out((count,), probs.dtype)
        out = self.out((count, width) if with_output else (0,), gate_up.dtype)
        form = "" if self.aligned(grad, gate_up[:, :width]) else "any_"
        name = f"ho_weighted_swiglu_backward_{form}{SHORT[gate_up.dtype]}"
        self.launch_rows(
            "weighted_swiglu",
            name,
            count,
            [
                self.rows(grad),
                self.rows(gate_up),
                self.put(probs),
                self.put(offsets),
                d_gate_up,
                d_probs,
                out if with_output else None,
                np.int64(count),
                np.int32(width),
                np.int64(grad.stride(0)),
                np.int64(gate_up.stride(0)),
                np.int32(0 if offsets is None else len(offsets)),
                np.int32(probs.dtype == BF16),
            ],
        )
        return tuple(to_torch(b.read()) for b in (d_gate_up, d_probs, out))


@dataclass
class TritonOnDevice(OnDevice):
    """The Triton kernels with the tiles that their launchers choose for waves of 64."""

    def run(self, kernel, grid: tuple[int, int], values: dict, constexprs: dict, num_warps: int = 4) -> None:
        """values by name: (buffer, dtype of its elements), a whole number, or a float."""
        signature, given, divisible = {}, [], []
        for name in kernel.arg_names:
            if name in constexprs:
                continue
            value = values[name]
            if isinstance(value, float):
                signature[name] = "fp32"
                given.append(np.float32(value))
            elif isinstance(value, int):
                signature[name] = "i32"
                given.append(np.int32(value))
                if value % 16 == 0:
                    divisible.append(name)
            else:
                given.append(value[0])
                signature[name] = TYPES[value[1]]
                divisible.append(name)
        compiled = triton_code_object(kernel, signature, constexprs, num_warps=num_warps, divisible_by_16=divisible)
        self.counters[kernel.__name__] = compiled.launch(self.device, (*grid, 1), given)

    def sort_by_expert(self, ids: Tensor, experts: int, programs: int = 256) -> tuple[Tensor, ...]:
        from hip_ops.ops.expert_permutation import triton as kernels

        tokens, (padded, tile) = len(ids), kernels.sort_tile(experts)
        tiles = -(-tokens // (tile * programs))
        programs = -(-tokens // (tiles * tile))
        counted, results = self.out((programs, padded), torch.int32), self.sort_results(tokens, experts)
        names = ("token_of_row", "row_of_token", "counts", "offsets")
        values = {
            "expert_ids": (self.put(ids), ids.dtype),
            "counted": (counted, torch.int32),
            "tokens": tokens,
            "num_experts": experts,
        }
        values |= {name: (buffer, torch.int32) for name, buffer in zip(names, results, strict=True)} | {
            "tiles": tiles,
            "programs": programs,
        }
        self.run(kernels.expert_count_kernel, (programs, 1), values, {"EXPERTS": padded, "TILE": tile})
        self.run(
            kernels.expert_place_kernel,
            (programs, 1),
            values,
            {"EXPERTS": padded, "TILE": tile, "ROWS": 4096 // padded},
        )
        return tuple(to_torch(r.read()) for r in results)

    def gather_rows(self, source: Tensor, index: Tensor, inverse: Tensor, side: Tensor | None) -> tuple[Tensor, Tensor]:
        from hip_ops.ops.expert_permutation import triton as kernels

        (count, hidden), map_of = source.shape, (self.put(index), torch.int32)
        out, side_out = (
            self.out((count, hidden), source.dtype),
            self.out((count,) if side is not None else (0,), source.dtype if side is None else side.dtype),
        )
        chosen = kernels.launch(hidden, source.element_size(), warp_size=64)
        values = {
            "source": (self.rows(source), source.dtype),
            "index": map_of,
            "out": (out, source.dtype),
            "rows": count,
            "hidden": hidden,
            "side": map_of if side is None else (self.put(side), side.dtype),
            "side_out": map_of if side is None else (side_out, side.dtype),
            "source_stride": source.stride(0),
        }
        constexprs = {"HAS_SIDE": side is not None, "ROWS": chosen.rows, "BLOCK": chosen.columns}
        if count:
            self.run(
                kernels.expert_gather_kernel,
                (-(-count // chosen.rows), -(-hidden // chosen.columns)),
                values,
                constexprs,
                chosen.num_warps,
            )
        return to_torch(out.read()), to_torch(side_out.read())

    def weighted_swiglu(self, gate_up: Tensor, probs: Tensor, offsets: Tensor | None) -> Tensor:
        from hip_ops.ops.weighted_swiglu import triton as kernels

        count, width = gate_up.shape[0], gate_up.shape[1] // 2
        out, chosen = (
            self.out((count, width), gate_up.dtype),
            kernels.launch(width, gate_up.element_size(), backward=False, warp_size=64),
        )
        values = self._swiglu_values(gate_up, probs, offsets) | {"out": (out, gate_up.dtype)}
        constexprs = {"HAS_OFFSETS": offsets is not None, "ROWS": chosen.rows, "BLOCK": chosen.columns}
        self.run(
            kernels.weighted_swiglu_forward_kernel,
            (-(-count // chosen.rows), -(-width // chosen.columns)),
            values,
            constexprs,
            chosen.num_warps,
        )
        return to_torch(out.read())

    def _swiglu_values(self, gate_up: Tensor, probs: Tensor, offsets: Tensor | None) -> dict:
        given = (self.put(probs), probs.dtype)
        return {
            "gate_up": (self.rows(gate_up), gate_up.dtype),
            "probs": given,
            "offsets": given if offsets is None else (self.put(offsets), torch.int32),
            "rows": len(gate_up),
            "width": gate_up.shape[1] // 2,
            "gate_up_stride": gate_up.stride(0),
            "experts": 0 if offsets is None else len(offsets),
        }

    def weighted_swiglu_backward(
        self, grad: Tensor, gate_up: Tensor, probs: Tensor, offsets: Tensor | None, with_output: bool
    ):
        from hip_ops.ops.weighted_swiglu import triton as kernels

        count, width = grad.shape
        d_gate_up, d_probs = self.out((count, 2 * width), gate_up.dtype), self.out((count,), probs.dtype)
        out = self.out((count, width) if with_output else (0,), gate_up.dtype)
        chosen = kernels.launch(width, gate_up.element_size(), backward=True, warp_size=64)
        values = self._swiglu_values(gate_up, probs, offsets) | {
            "grad": (self.rows(grad), grad.dtype),
            "d_gate_up": (d_gate_up, gate_up.dtype),
            "d_probs": (d_probs, probs.dtype),
            "out": (out, gate_up.dtype),
            "grad_stride": grad.stride(0),
        }
        constexprs = {
            "HAS_OFFSETS": offsets is not None,
            "WITH_OUTPUT": with_output,
            "ROWS": chosen.rows,
            "BLOCK": chosen.columns,
        }
        self.run(
            kernels.weighted_swiglu_backward_kernel, (-(-count // chosen.rows), 1), values, constexprs, chosen.num_warps
        )
        return tuple(to_torch(b.read()) for b in (d_gate_up, d_probs, out))
