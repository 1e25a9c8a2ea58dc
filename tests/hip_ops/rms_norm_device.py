# SPDX-License-Identifier: Apache-2.0
"""Runs gfx942 code objects of the RMSNorm and LayerNorm kernels, HIP's and Triton's, in the emulator as an Implementation of
rms_norm_cases.

The launchers of csrc/ choose kernel, grid and block on a GPU; this file makes the same choice once more, in Python,
from the table in rms_norm.h, for as many compute units as asked for.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hip_ops.ops.rms_norm.hip import ALIGNED, BF16_RESIDUAL, BF16_WEIGHT, BF16_X
from tests.gfx942.emulator import Buffer, Counters, Device
from tests.gfx942.toolchain import code_object
from tests.hip_ops.kernel_files import kernel_source
from tests.hip_ops.rms_norm_cases import BF16, FP32, VECTORS, Case, Implementation, Inputs

NUMPY = {BF16: np.uint16, FP32: np.float32}


def to_numpy(tensor: Tensor) -> np.ndarray:
    tensor = tensor.contiguous()
    return tensor.view(torch.int16).numpy().view(np.uint16) if tensor.dtype == BF16 else tensor.numpy()


def to_torch(array: np.ndarray) -> Tensor:
    return torch.from_numpy(array.view(np.int16)).view(BF16) if array.dtype == np.uint16 else torch.from_numpy(array)


@functools.cache
def table(centered: bool = False) -> dict[int, tuple[int, int, int, int]]:
    """hidden size -> blocks a compute unit: forward, ZAYA's, backward, ZAYA's. centered: of LayerNorm."""
    text = kernel_source("rms_norm.h").read_text()
    if centered:
        text = re.search(r"#define HO_LAYER_NORM_TABLE.*?\n#", text, re.S)[0]
    rows = re.findall(r"ROW\((\d+), (\d+), (\d+), (\d+), (\d+)\)", text)
    return {int(hidden): tuple(map(int, blocks)) for hidden, *blocks in rows}


@dataclass(frozen=True)
class Geometry:
    """What the launchers make of a case: suffix of the kernel's name, threads a block, rows a block at a time,
    blocks.
    """

    suffix: str
    threads: int
    rows_per_block: int
    blocks: int


def geometry(case: Case, *, backward: bool, processors: int) -> Geometry:
    aligned = case.pad % 8 == 0 and case.hidden % 8 == 0
    fast = (
        aligned
        and case.hidden in table(case.centered)
        and case.x_dtype == case.weight_dtype == BF16
        and case.residual_dtype == (FP32 if case.scaled else BF16)
    )
    if fast:
        row_threads = case.hidden // 8
        threads, rows, most = (
            max(256, row_threads),
            max(256, row_threads) // row_threads,
            table()[case.hidden][2 * backward + case.scaled],
        )
    else:
        threads, rows, most = 256, 1, 4
    tiles = -(-case.rows // rows)
    rounds = -(-tiles // (processors * most))
    form = ("scaled_residual_" if case.scaled else "add_") if fast else ""
    norm = "layer_norm" if fast and case.centered else "rms_norm"
    return Geometry(
        f"{form}{norm}{'_backward' if backward else ''}_{case.hidden if fast else 'any'}",
        threads,
        rows,
        -(-tiles // rounds),
    )


def types(case: Case) -> int:
    bits = sum(
        bit
        for bit, dtype in (
            (BF16_X, case.x_dtype),
            (BF16_RESIDUAL, case.residual_dtype),
            (BF16_WEIGHT, case.weight_dtype),
        )
        if dtype == BF16
    )
    return bits | (ALIGNED if case.pad % 8 == 0 and case.hidden % 8 == 0 else 0)


@dataclass
class Emulated:
    """`objects` compiles a source of csrc/ by name; `counters` collects what each launch counted, by kernel."""

    device: Device
    processors: int = 1
    objects: Callable[[str], Path] = code_object
    counters: dict[str, Counters] = field(default_factory=dict)

    @property
    def implementation(self) -> Implementation:
        return Implementation(self.forward, self.backward)

    def rows(self, tensor: Tensor | None, case: Case) -> Buffer | None:
        """The rows with their padding, which is NaN: reading it shows. A stride is hidden + pad."""
        if tensor is None:
            return None
        whole = torch.full((case.rows, case.hidden + case.pad), float("nan"), dtype=tensor.dtype)
        whole[:, : case.hidden] = tensor
        return self.device.put(to_numpy(whole))

    def out(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        return self.device.alloc(shape, NUMPY[dtype])

    def launch(self, source: str, kernel: str, blocks: int, threads: int, arguments: list) -> None:
        self.counters[kernel] = self.device.launch(self.objects(source), kernel, (blocks,), (threads,), arguments)

    def vectors(self, i: Inputs) -> tuple[list[Buffer | None], Buffer]:
        """The four of the merge, and weight."""
        *merge, weight = (self.device.put(to_numpy(i.vectors[name])) for name in VECTORS)
        return merge if i.case.scaled else [None] * 4, weight

    def statistics(self, case: Case) -> list[Buffer]:
        """For rstd, and before it for LayerNorm's mean."""
        return [self.out((case.rows, 1), FP32) for _ in range(1 + case.centered)]

    def forward(self, i: Inputs) -> tuple[Tensor, ...]:
        case, chosen = i.case, geometry(i.case, backward=False, processors=self.processors)
        shape, stride = (case.rows, case.hidden), np.int64(case.hidden + case.pad)
        merge, weight = self.vectors(i)
        y, new_residual = self.out(shape, case.weight_dtype), self.out(shape, case.residual_dtype)
        *mean, rstd = self.statistics(case)
        arguments = [
            self.rows(i.x, case),
            self.rows(i.residual, case),
            *merge,
            weight,
            y,
            new_residual,
            rstd,
            np.int64(case.rows),
            stride,
            stride,
            np.float32(case.eps),
        ]
        if chosen.suffix.endswith("any"):
            arguments += [np.int32(case.hidden), np.int64(types(case))]
        if case.centered:
            arguments += [self.device.put(to_numpy(i.bias)), *mean]
        elif chosen.suffix.endswith("any"):
            arguments += [None, None]
        self.launch("rms_norm", f"ho_{chosen.suffix}", chosen.blocks, chosen.threads, arguments)
        return tuple(to_torch(b.read()) for b in (y, new_residual, *mean, rstd))

    def backward(self, i: Inputs, new_residual: Tensor, *statistics: Tensor) -> dict[str, Tensor]:
        case, chosen = i.case, geometry(i.case, backward=True, processors=self.processors)
        shape, stride, sums = (
            (case.rows, case.hidden),
            np.int64(case.hidden + case.pad),
            (4 if case.scaled else 1) + case.centered,
        )
        merge, weight = self.vectors(i)
        d_x, d_residual = self.out(shape, case.x_dtype), self.out(shape, case.residual_dtype)
        partial = self.out((chosen.blocks, sums, case.hidden), FP32)
        arguments = [
            self.rows(i.dy, case),
            self.rows(i.d_new_residual, case),
            self.rows(i.x, case) if case.scaled else None,
            self.rows(i.residual if case.scaled else new_residual, case),
            self.device.put(statistics[-1].numpy()),
            *merge,
            weight,
            d_x,
            d_residual,
            partial,
            np.int64(case.rows),
            stride,
            stride,
            stride,
            stride,
        ]
        if chosen.suffix.endswith("any"):
            arguments += [np.int32(case.hidden), np.int64(types(case))]
        if case.centered:
            arguments.append(self.device.put(statistics[0].numpy()))
        elif chosen.suffix.endswith("any"):
            arguments.append(None)
        self.launch("rms_norm_backward", f"ho_{chosen.suffix}", chosen.blocks, chosen.threads, arguments)
        names = [f"d_{n}" for n in (VECTORS if case.scaled else VECTORS[-1:])] + ["d_bias"] * case.centered
        gradients = {name: self.out((case.hidden,), case.weight_dtype) for name in names}
        sizes = [np.int64(chosen.blocks), np.int32(case.hidden), np.int64(types(case))]
        *first, last = gradients.values() if case.centered else (*gradients.values(), None)
        norm = "layer_norm" if case.centered else "rms_norm"
        name = f"ho_{norm}_sum_vectors" if case.scaled else f"ho_{norm}_sum_weight"
        self.launch(
            "rms_norm_sum",
            name,
            -(-case.hidden // 16),
            512,
            [partial, *(merge if case.scaled else []), *first, *sizes, *([last] if case.centered else [])],
        )
        found = {"d_x": d_x, "d_residual": d_residual} | gradients
        if not case.scaled and case.x_dtype == case.residual_dtype:
            found["d_x"] = d_residual
        return {key: to_torch(buffer.read()) for key, buffer in found.items()}
