# SPDX-License-Identifier: Apache-2.0
"""Loads the built kernels, one library per target, and calls their launchers on the current stream.

This is the convention of all launchers. A launcher is

    HO_EXPORT int ho_<operator>(const void* in, void* out, int64_t rows, float eps, void* stream)

with int64_t for integers and flags, float or double for real numbers, pointers for tensors, and the stream last. It
only checks that a variant exists, and returns 0, the runtime's error code, or -1 for "no such variant". The operator
checks shapes, dtypes, strides and alignment before the call. ctypes would pass any number of arguments of any type, so
their types are set from the declarations in the sources.

A process must have one HIP runtime (libamdhip64). With two, launches on the default stream work, and every other stream
of torch is unknown to the second runtime: error 709 (ROCm/mori#402, sgl-project/sglang#39513). So the shipped library
names no runtime of its own. Its symbols are those of the one that torch has mapped, after that was opened again with
RTLD_GLOBAL.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import torch

from hip_ops.errors import mistake
from hip_ops.runtime.build import SHIPPED, BuildError, build, kernel_sources, manifest_of
from hip_ops.runtime.compilers import AMD_ARCHITECTURES, CompilerNotFound, default_amd_target
from hip_ops.runtime.launch import aligned, architecture, blocks_for

ABI_VERSION = 1

_DECLARATION = re.compile(r"HO_EXPORT\s+(int|int64_t)\s+(ho_\w+)\s*\(([^)]*)\)")
_NUMBERS = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double}

_FILE = re.compile(r"libamdhip64[^/]*\.so[^/]*$")
_NUMBER = re.compile(r"\.so\.(\d+)")
_SONAME = re.compile(rb"\0libamdhip64\.so\.(\d+)\0")  # as a library's own name, or as that of one it needs

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
    bind_runtime()
    loaded = load(path)
    the_runtime(torch.version.hip, own_maps(), linked_major())  # a library of hipcc may bring a second runtime
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
        shown = [tuple(a.shape) if isinstance(a, torch.Tensor) else a for a in arguments]
        raise RuntimeError(f"hip_ops: {name} has no variant for these arguments on {target}: {shown}")
    raise RuntimeError(f"hip_ops: {name} failed on {device} with code {code}: {loaded.ho_error_string(code).decode()}")


def call_rows(name: str, *arguments, wide: Sequence[torch.Tensor], device: torch.device) -> None:
    """Run a launcher of a row kernel, whose last arguments are the choice of the kernel with 16 bytes per lane and the
    number of blocks. wide: the tensors whose rows that kernel reads and writes. Does nothing without rows.
    """
    if len(wide[0]):
        call(name, *arguments, aligned(*wide), blocks_for(len(wide[0]), device), device=device)


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


def default_target() -> str:
    """Return the default of `python -m hip_ops build --target`: the first device's target, otherwise AMD's default."""
    return target_of(torch.device("cuda", 0)) if torch.cuda.is_available() else default_amd_target()


@lru_cache
def declarations(*files: Path) -> dict[str, tuple[type, tuple[type, ...]]]:
    """Return by name the ctypes of result and parameters of every function that `files` export and that returns a
    number.

    files: by default all .hip files of hip_ops."""
    functions = {}
    for file in files or kernel_sources():
        for result, name, parameters in _DECLARATION.findall(file.read_text()):
            functions[name] = _NUMBERS[result], tuple(_ctype(file, name, p) for p in parameters.split(",") if p.strip())
    return functions


def _ctype(file: Path, name: str, parameter: str) -> type:
    if "*" in parameter:
        return ctypes.c_void_p
    kind = parameter.split()[0]
    assert kind in ("int64_t", "float", "double"), (
        f"{file.name}: parameter `{parameter.strip()}` of {name}; allowed are pointers, int64_t, float, double"
    )
    return _NUMBERS[kind]


def loadable(path: Path) -> str:
    """Return the name under which the loader can map the library at `path`: the path, or that of a copy in memory
    where its file system is mounted noexec."""
    if not os.statvfs(path).f_flag & os.ST_NOEXEC:
        return str(path)
    # The descriptor stays open: the loader knows libraries by name, and another one must not get this name.
    copy = os.memfd_create(path.name)
    with open(copy, "wb", closefd=False) as file:
        file.write(path.read_bytes())
    return f"/proc/self/fd/{copy}"


def load(path: Path, *files: Path) -> ctypes.CDLL:
    """Load the library at `path` and set the types of the functions that `files` declare. Raises RuntimeError for
    another ABI version.
    """
    loaded = ctypes.CDLL(loadable(path))
    version = loaded.ho_abi_version()
    if version != ABI_VERSION:
        raise RuntimeError(
            f"hip_ops: {path} has ABI version {version}, this hip_ops requires {ABI_VERSION}. Fix: `python -m hip_ops "
            "build --force`"
        )
    loaded.ho_error_string.restype = ctypes.c_char_p
    loaded.ho_error_string.argtypes = (ctypes.c_int,)
    for name, (result, types) in declarations(*files).items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, types
    return loaded


def own_maps() -> str:
    return Path("/proc/self/maps").read_text()


def mapped_runtimes(maps: str) -> list[Path]:
    """Return the files of HIP's runtime in the text of /proc/<id>/maps, each once."""
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if "libamdhip64" in line)
    return [Path(path) for path in dict.fromkeys(paths) if _FILE.search(path)]


def major_version(runtime: Path) -> int | None:
    """Return HIP's major version: of the file's name, otherwise of the SONAME inside it (torch's wheels drop the
    number from the name), otherwise None."""
    numbered = _NUMBER.search(runtime.name)
    if numbered:
        return int(numbered[1])
    try:
        with open(runtime, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            soname = _SONAME.search(content)
            return int(soname[1]) if soname else None
    except (OSError, ValueError):
        return None


def linked_major() -> int | None:
    """Return the major version of the HIP runtime with which torch was linked: of the runtime in its own folder, else of
    the one that its libraries name. None where neither tells it."""
    folder = Path(torch.__file__).parent / "lib"
    known = (major_version(folder / name) for name in ("libamdhip64.so", "libc10_hip.so"))
    return next((major for major in known if major is not None), None)


def the_runtime(torch_hip: str, maps: str, linked: int | None = None) -> Path:
    """Return the one HIP runtime of the process. Raises ValueError where there is none, more than one, or one of
    another major version than torch's.

    torch_hip: torch.version.hip. maps: text of /proc/self/maps. linked: the answer of `linked_major`, which counts where
    there is one: some builds of torch write ROCm's version into torch.version.hip (pytorch/pytorch#166336), and ROCm 10
    brings HIP 7.
    """
    required = int(torch_hip.split(".")[0]) if linked is None else linked
    versions = {path: major_version(path) for path in mapped_runtimes(maps)}
    if len(versions) == 1 and set(versions.values()) <= {required, None}:
        return next(iter(versions))

    def described(path: Path, major: int | None) -> str:
        relation = "" if major is None else ", torch's version" if major == required else ", not torch's version"
        return f"{path} (HIP {major or 'unknown'}{relation})"

    listed = " and ".join(described(*entry) for entry in versions.items()) or "no HIP runtime"
    raise mistake(
        "libamdhip64",
        f"this process has mapped {listed}, and torch was built for HIP {torch_hip}",
        f"one HIP runtime, of major version {required}",
        "let LD_LIBRARY_PATH and LD_PRELOAD name only the ROCm of this torch, and reinstall for that ROCm the packages "
        "that load another one (`ldd FILE.so | grep amdhip64` shows what a library loads)",
    )


def bind_runtime() -> ctypes.CDLL:
    """Open the HIP runtime of the process again, so that libraries that are loaded later find its symbols. Raises
    ValueError as `the_runtime`.
    """
    runtime = the_runtime(torch.version.hip, own_maps(), linked_major())
    return ctypes.CDLL(str(runtime), mode=os.RTLD_GLOBAL | os.RTLD_NOLOAD)
