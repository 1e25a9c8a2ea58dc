# SPDX-License-Identifier: Apache-2.0
"""Loads the built kernels, one library per target, and calls them on the current stream. launchers.py states the C
convention.
"""

import ctypes
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from hip_ops.runtime.architecture import architecture
from hip_ops.runtime.build import SHIPPED, BuildError, build, manifest_of
from hip_ops.runtime.compilers import AMD_ARCHITECTURES, CompilerNotFound, default_amd_target
from hip_ops.runtime.hip_runtime import bind, own_maps, the_runtime
from hip_ops.runtime.launchers import load
from hip_ops.runtime.row_views import aligned, blocks_for

# a failed build is not repeated in this process, because every operator would wait for it
_failures: dict[str, Exception] = {}
_paths: dict[str, Path] = {}  # of the libraries that this process has loaded, by target


def target_of(device: torch.device) -> str:
    """Return the target whose library runs on `device`. Raises ValueError where the kernels cannot run."""
    if device.type == "cpu":
        return "cpu"
    if device.type != "cuda":
        raise ValueError(f"hip_ops: the kernels run on AMD and NVIDIA GPUs and on the CPU, not on device {device}")
    name = architecture(device)
    if torch.version.hip is None or name in AMD_ARCHITECTURES:
        return name
    raise ValueError(
        f"hip_ops: {device} is {name}; the kernels need waves of 64 and MFMA: {', '.join(AMD_ARCHITECTURES)}"
    )


def library(target: str) -> ctypes.CDLL:
    """Return the library of `target`; builds it if none is shipped and the cache has none. Raises the errors of
    `build`, OSError where it cannot be loaded, and ValueError where the process has not one HIP runtime, that of torch.
    """
    if target in _failures:
        raise _failures[target]
    try:
        return _library(target)
    except (BuildError, CompilerNotFound, OSError, RuntimeError, ValueError) as error:
        _failures[target] = error
        raise


@lru_cache
def _library(target: str) -> ctypes.CDLL:
    path = _paths[target] = build(target)
    if target not in AMD_ARCHITECTURES:
        return load(path)
    if torch.version.hip is None:
        raise RuntimeError(
            f"hip_ops: the {target} kernels need a ROCm build of torch; this torch is {torch.__version__}"
        )
    bind(the_runtime(torch.version.hip, own_maps()))
    loaded = load(path)
    the_runtime(torch.version.hip, own_maps())  # a library that hipcc built brings the runtime of that ROCm
    return loaded


def identity(device: torch.device) -> str | None:
    """Say which library this process has loaded for `device`, or None: equal texts mean the same code."""
    path = _paths.get(target_of(device))
    if path is None:
        return None
    if SHIPPED in path.parents:
        return f"shipped, sha256 {manifest_of(path)['sha256']}"
    return f"built from source, {path.parent.name}"  # target, and the hash of sources, flags and compiler


def call(name: str, *arguments, device: torch.device) -> None:
    """Run launcher `name` on the current stream of `device`.

    arguments: all but the stream. A pointer is a tensor on `device`, None or a ctypes array.
    Raises RuntimeError with the launcher's name and code unless it returns 0. Does not wait for the device.
    """
    target = target_of(device)
    loaded = library(target)
    function = getattr(loaded, name)
    types = function.argtypes
    assert types is not None, f"{name} is exported by no .hip file"
    assert len(arguments) == len(types) - 1, (
        f"{name} takes {len(types) - 1} arguments and the stream, {len(arguments)} were given"
    )
    converted = [
        _convert(name, place, argument, kind, device)
        for place, (argument, kind) in enumerate(zip(arguments, types, strict=False))
    ]
    if device.type == "cpu":
        code = function(*converted, None)
    else:
        with torch.cuda.device(device):
            code = function(*converted, torch.cuda.current_stream(device).cuda_stream)
    if code == 0:
        return
    if code < 0:
        raise RuntimeError(f"hip_ops: {name} has no variant for these arguments on {target}: {_numbers(arguments)}")
    raise RuntimeError(f"hip_ops: {name} failed on {device} with code {code}: {loaded.ho_error_string(code).decode()}")


def call_rows(name: str, *arguments, rows: int, wide: Sequence[torch.Tensor], device: torch.device) -> None:
    """Run a launcher of a row kernel, whose last arguments are the choice of the kernel with 16 bytes per lane and the
    number of blocks. wide: the tensors whose rows that kernel reads and writes.
    """
    call(name, *arguments, aligned(*wide), blocks_for(rows, device), device=device)


def _convert(name: str, place: int, argument, kind: type, device: torch.device):
    if kind is ctypes.c_void_p:
        if isinstance(argument, torch.Tensor):
            assert argument.device.type == device.type and device.index in (None, argument.device.index), (
                f"{name}: argument {place} is on {argument.device}, the call on {device}"
            )
            return argument.data_ptr()
        assert argument is None or isinstance(argument, ctypes.Array), (
            f"{name}: argument {place} is {type(argument).__name__}, the launcher takes a pointer"
        )
        return argument
    whole = kind is ctypes.c_int64
    assert isinstance(argument, int if whole else (int, float)), (
        f"{name}: argument {place} is {type(argument).__name__}, the launcher takes {kind.__name__}"
    )
    return argument


def _numbers(arguments) -> list:
    return [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in arguments]


def default_target() -> str:
    """Return the default of `python -m hip_ops build --target`: the first device's target, otherwise AMD's default."""
    return target_of(torch.device("cuda", 0)) if torch.cuda.is_available() else default_amd_target()
