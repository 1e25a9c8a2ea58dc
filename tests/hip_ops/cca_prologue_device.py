# SPDX-License-Identifier: Apache-2.0
"""Runs the gfx942 code objects of hip_ops/ops/cca_prologue/cca_prologue*.hip in the emulator, under the host code of
hip_ops.ops.cca_prologue.hip.

What the launchers of csrc/ do on a GPU - which kernels, grids and arguments - is done once more by this file, in
Python, for as many compute units as asked for. Results are filled with NaN before a launch:
so that unwritten elements are visible.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from hip_ops.ops.cca_prologue import hip as hip_kernels
from tests.gfx942.emulator import Buffer, Counters, Device
from tests.gfx942.toolchain import code_object

TILE, XCDS, THREADS = 32, 8, 256


def tiles_of(rows: int) -> int:
    return -(-rows // TILE)


def runs(groups: int, roles: int, tiles: int, processors: int, resident: int) -> int:
    """prologue_runs of cca_prologue.h."""
    dealt = XCDS % groups == 0
    all_roles, places = (roles, XCDS // groups) if dealt else (roles * groups, XCDS)
    return places * max(1, min(processors * resident // XCDS // all_roles, -(-tiles // places)))


def backward_tiles(total: int, rows: int, batch: int, has_halo: bool) -> int:
    """Of one micro-batch entry each, with the two rows of a halo."""
    return total // rows * tiles_of(rows + 2 * has_halo)


def flat(tensor: Tensor) -> Tensor:
    """All that lies between a tensor's first and last element."""
    extent = (
        1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        if tensor.numel()
        else 0
    )
    return tensor.as_strided((extent,), (1,), tensor.storage_offset())


def to_numpy(tensor: Tensor) -> np.ndarray:
    values = flat(tensor).clone()
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(np.uint16)
    return values.view(torch.uint8).numpy() if values.dtype == torch.bool else values.numpy()


@dataclass
class Emulated:
    """A module like hip_ops.ops.cca_prologue.hip. `objects` compiles a source of csrc/ by name; `counters` keeps what each
    launch counted.
    """

    device: Device
    processors: int = 1
    objects: Callable[[str], Path] = code_object
    counters: dict[str, Counters] = field(default_factory=dict)

    def cca_prologue(self, *arguments):
        return self._run(hip_kernels.cca_prologue, arguments)

    def cca_prologue_backward(self, *arguments):
        return self._run(hip_kernels.cca_prologue_backward, arguments)

    def _run(self, function, arguments):
        def count(total, rows, batch, heads, groups, has_halo, processors):
            return runs(groups, heads // groups + 1, backward_tiles(total, rows, batch, has_halo), processors, 1)

        functions = SimpleNamespace(ho_cca_prologue_backward_blocks=count)
        with (
            mock.patch.object(hip_kernels, "call", lambda name, *a, device: getattr(self, "_" + name)(*a)),
            mock.patch.object(hip_kernels, "library", lambda target: functions),
            mock.patch.object(hip_kernels, "multiprocessors", lambda device: self.processors),
        ):
            return function(*arguments)

    def _launch(
        self, source: str, kernel: str, blocks: int, given: list, written: list[Tensor | None], threads: int = THREADS
    ) -> None:
        """given: kernel arguments; a tensor becomes a buffer, one of `written` is read back."""
        buffers: dict[int, Buffer] = {}
        written = [t for t in written if t is not None and t.numel()]

        def convert(value):
            if not isinstance(value, Tensor):
                return value
            if id(value) not in buffers:
                buffers[id(value)] = self.device.put(to_numpy(value)) if value.numel() else None
            return buffers[id(value)]

        self.counters[kernel] = self.device.launch(
            self.objects(source), kernel, (blocks,), (threads,), [convert(value) for value in given]
        )
        for tensor in written:
            values = torch.from_numpy(
                buffers[id(tensor)].read().view(np.int16)
                if tensor.dtype == torch.bfloat16
                else buffers[id(tensor)].read()
            )
            flat(tensor).copy_(values.view(tensor.dtype).flatten())

    def _ho_cca_prologue(self, *arguments) -> None:
        pointers, strides, sizes = arguments[:14], arguments[14:18], arguments[18:25]
        total, _, _, heads, groups, _, _ = sizes
        for result in pointers[10:]:
            result.fill_(float("nan"))
        blocks = runs(groups, heads // groups + 2, tiles_of(total), self.processors, 2) * (heads // groups + 2) * groups
        given = [*pointers, *map(np.int64, strides), *map(np.int32, sizes)]
        self._launch("cca_prologue", "ho_cca_prologue_forward", blocks, given, list(pointers[10:]))

    def _ho_cca_prologue_backward(self, *arguments) -> None:
        pointers, strides, sizes = arguments[:20], arguments[20:33], arguments[33:40]
        d_query, d_key, d_value, query, key, norm, temperature, rope, projected, halo, depthwise, grouped, starts = (
            pointers[:13]
        )
        dy, d_projected, d_halo, d_value_halo, *partials = pointers[13:]
        total, rows, batch, heads, groups, rotary, delayed = sizes
        for result in pointers[13:]:
            if result is not None:
                result.fill_(float("nan"))
        tiles, roles = backward_tiles(total, rows, batch, halo is not None), heads // groups + 1
        for name, given, numbers, written, resident, threads in (
            (
                "weights",
                (d_query, d_key, query, key, norm, temperature, rope, projected, halo, starts, dy, *partials),
                (*strides[:6], *strides[9:], tiles, total, rows, batch, heads, groups, rotary),
                (dy, *partials),
                1,
                512,
            ),
            (
                "input",
                (dy, d_value, depthwise, grouped, starts, d_projected, d_halo, d_value_halo),
                (*strides[6:9], tiles, total, rows, batch, heads, groups, delayed),
                (d_projected, d_halo, d_value_halo),
                2,
                THREADS,
            ),
        ):
            blocks = runs(groups, roles, tiles, self.processors, resident) * roles * groups
            self._launch(
                "cca_prologue_backward",
                f"ho_cca_prologue_backward_{name}",
                blocks,
                [*given, *map(np.int32, numbers)],
                list(written),
                threads,
            )

    def _ho_cca_prologue_parameters(self, *arguments) -> None:
        d_key, projected, *weights, temperature, rope, halo, starts, partial, bias, along, zero = arguments[:14]
        gradients, strides, sizes, (all_runs, zero_runs) = (
            arguments[14:19],
            arguments[19:26],
            arguments[26:32],
            arguments[32:34],
        )
        for result in (zero, *gradients):
            result.fill_(float("nan"))
        heads, groups = sizes[3:5]
        given = [
            d_key,
            projected,
            *weights,
            temperature,
            rope,
            halo,
            starts,
            zero,
            *map(np.int64, strides),
            *map(np.int32, sizes),
        ]
        self._launch(
            "cca_prologue_parameters",
            "ho_cca_prologue_backward_temperature",
            groups * zero_runs,
            given,
            [zero],
            threads=128,
        )
        given = [
            partial,
            bias,
            along,
            zero,
            *weights[:3],
            temperature,
            *gradients,
            *map(np.int64, (all_runs, zero_runs)),
            np.int32(heads),
            np.int32(groups),
        ]
        self._launch(
            "cca_prologue_parameters", "ho_cca_prologue_backward_sum", (heads + groups) * 8, given, list(gradients)
        )
