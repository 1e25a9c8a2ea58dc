# SPDX-License-Identifier: Apache-2.0
"""A HIP runtime that records launches of code objects, or runs them in the emulator on tensors that lie on the CPU. Only
for processes of their own, because the library stays mapped, and within `launched_as_on("gfx942")`.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from hip_ops.runtime import code_objects
from tests.gfx942.emulator import Device
from tests.hip_ops.fake_gpu import FakeGpu

SOURCE = Path(__file__).parent / "kernels" / "recorded_modules.c"
STREAM = 0x5EED


class Launch(ctypes.Structure):
    _fields_ = [
        ("image", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("arguments", ctypes.c_void_p),
        ("image_size", ctypes.c_uint64),
        ("arguments_size", ctypes.c_uint64),
        ("stream", ctypes.c_uint64),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
    ]


LAUNCHED = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Launch))


def compiled_runtime(folder: Path) -> Path:
    """Compile the library with the name of ROCm 7's."""
    library = folder / "libamdhip64.so.7"
    command = ["cc", "-shared", "-fPIC", "-O1", str(SOURCE), f"-Wl,-soname,{library.name}", "-o", str(library)]
    subprocess.run(command, check=True)
    return library


class RecordedModules:
    """launches: of each the code, the kernel, grid, block, LDS, stream and the bytes of its arguments. run: called with
    them and the tensors; by default nothing runs. load_code: that hipModuleLoadData returns. launch_code: that
    hipModuleLaunchKernel returns.
    """

    def __init__(self, monkeypatch, library: Path, load_code: int = 0):
        self.launches: list[SimpleNamespace] = []
        self.run: Callable | None = None
        self.launch_code = 0
        self.gpu = FakeGpu(monkeypatch, hip="7.1")
        monkeypatch.setattr(code_objects, "architecture", lambda device: "gfx942")
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
        self._callback = LAUNCHED(self._launched)  # kept: the library calls it
        runtime = ctypes.CDLL(str(library))
        runtime.test_set.argtypes = (LAUNCHED, ctypes.c_int)
        runtime.test_set(self._callback, load_code)

    def _launched(self, pointer) -> int:
        launch = pointer.contents
        self.launches.append(
            SimpleNamespace(
                code=ctypes.string_at(launch.image, launch.image_size),
                module=launch.image,
                kernel=launch.name.decode(),
                grid=tuple(launch.grid),
                block=tuple(launch.block),
                shared=launch.shared,
                stream=launch.stream,
                arguments=ctypes.string_at(launch.arguments, launch.arguments_size),
            )
        )
        if self.run is not None:
            frame = sys._getframe()
            while frame.f_code is not code_objects.launch_triton_kernel.__code__:
                frame = frame.f_back
            self.run(self.launches[-1], frame.f_locals["arguments"])
        return self.launch_code


def memory(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, from its first element to its last."""
    extent = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return np.frombuffer((ctypes.c_uint8 * (extent * tensor.itemsize)).from_address(tensor.data_ptr()), np.uint8)


def emulated(folder: Path) -> Callable:
    """Return the function `run` that executes a launch on the tensors' memory."""

    def run(launch: SimpleNamespace, arguments: tuple) -> None:
        path = folder / f"{abs(hash(launch.code)):x}.hsaco"
        path.write_bytes(launch.code)
        device, buffers, given = Device(allow_shifted_waves=True), {}, []
        for value in arguments:
            if isinstance(value, torch.Tensor) and value.numel():
                address = value.data_ptr()
                if address not in buffers:
                    buffers[address] = (device.put(memory(value)), memory(value))
                given.append(buffers[address][0])
            else:
                given.append(None if isinstance(value, torch.Tensor) else value)
        trailing = _trailing(path, launch.kernel, len(given))
        device.launch(path, launch.kernel, launch.grid, launch.block, [*given, *[None] * trailing], launch.shared)
        for buffer, bytes_of_tensor in buffers.values():
            bytes_of_tensor[:] = buffer.read()

    return run


def _trailing(path: Path, kernel: str, given: int) -> int:
    from tests.gfx942.emulator.code_object import open_code_object

    arguments = open_code_object(path).kernels[kernel].arguments
    return sum(not argument.kind.startswith("hidden_") for argument in arguments) - given
