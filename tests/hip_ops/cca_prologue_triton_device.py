# SPDX-License-Identifier: Apache-2.0
"""Runs the Triton kernels of the CCA prologue, compiled for gfx942, in the emulator, under their own host code."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from tests.gfx942.emulator import Counters, Device
from tests.gfx942.triton_objects import triton_code_object
from tests.hip_ops.cca_prologue_device import flat, to_numpy

KERNELS = tuple(f"cca_prologue_{name}_kernel" for name in ("taps", "forward", "norm", "input", "weight", "sum"))
NAMES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.uint8: "*u8"}


@dataclass
class EmulatedTriton:
    """A module like hip_ops.ops.cca_prologue.triton, as an MI300X with few processors would run it; `counters` by
    kernel.
    """

    device: Device
    processors: int = 8
    counters: dict[str, Counters] = field(default_factory=dict)

    def cca_prologue(self, *arguments):
        return self._run("cca_prologue", arguments)

    def cca_prologue_backward(self, *arguments):
        return self._run("cca_prologue_backward", arguments)

    def _run(self, function: str, arguments):
        from hip_ops.ops.cca_prologue import triton as module

        choose = module.launch
        with contextlib.ExitStack() as patched:
            for name in KERNELS:
                patched.enter_context(mock.patch.object(module, name, _Kernel(self, getattr(module, name))))
            patched.enter_context(
                mock.patch.object(module, "launch", lambda *a, **k: choose(*a, **(k | {"warp_size": 64})))
            )
            patched.enter_context(mock.patch.object(module, "multiprocessors", lambda device: self.processors))
            return getattr(module, function)(*arguments)


class _Kernel:
    """Stands for a jitted kernel: kernel[grid](*arguments, **constexprs and options)."""

    def __init__(self, owner: EmulatedTriton, kernel):
        self.owner, self.kernel, self.arg_names = owner, kernel, kernel.arg_names

    def __getitem__(self, grid):
        return lambda *arguments, **named: self._launch(grid, arguments, named)

    def _launch(self, grid, arguments, named) -> None:
        from hip_ops.ops.cca_prologue.triton_rows import SIZES

        device = self.owner.device
        constexprs = {name: value for name, value in named.items() if name in self.arg_names}
        names = [name for name in self.arg_names if name not in constexprs]
        signature, given, divisible, buffers = {}, [], [], {}
        for name, value in zip(names, arguments, strict=True):
            if isinstance(value, Tensor):
                signature[name] = NAMES[value.dtype]
                key = (value.data_ptr(), value.shape)
                if key not in buffers:
                    buffers[key] = (value, device.put(to_numpy(value)) if value.numel() else None)
                given.append(buffers[key][1])
                divisible.append(name)
            elif isinstance(value, float):
                signature[name] = "fp32"
                given.append(np.float32(value))
            else:
                wide = value >= 2**31
                signature[name] = "i64" if wide else "i32"
                given.append((np.int64 if wide else np.int32)(value))
                divisible += [name] * (value % 16 == 0 and name not in SIZES)
        compiled = triton_code_object(
            self.kernel,
            signature,
            constexprs,
            num_warps=named["num_warps"],
            num_stages=named.get("num_stages", 2),
            divisible_by_16=divisible,
        )
        self.owner.counters[self.kernel.__name__] = compiled.launch(device, (*grid, 1, 1)[:3], given)
        for tensor, buffer in buffers.values():
            if buffer is not None:
                values = buffer.read()
                values = torch.from_numpy(values.view(np.int16) if tensor.dtype == torch.bfloat16 else values)
                flat(tensor).copy_(values.view(tensor.dtype).flatten())
