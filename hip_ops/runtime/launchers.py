# SPDX-License-Identifier: Apache-2.0
"""Reads the HIP kernels' launchers and the types of their parameters from the sources. Needs no torch.

This is the convention of all launchers. A launcher is

    HO_EXPORT int ho_<operator>(const void* in, void* out, int64_t rows, float eps, void* stream)

with int64_t for integers and flags, float or double for real numbers, pointers for tensors, and the stream last. It
only checks that a variant exists, and returns 0, the runtime's error code, or -1 for "no such variant". The operator
checks shapes, dtypes, strides and alignment before the call. ctypes would pass any number of arguments of any type, so
their types are set from the declarations.
"""

import ctypes
import os
import re
from functools import lru_cache
from pathlib import Path

from hip_ops.runtime.build import kernel_sources

ABI_VERSION = 1

_DECLARATION = re.compile(r"HO_EXPORT\s+(int|int64_t)\s+(ho_\w+)\s*\(([^)]*)\)")
_NUMBERS = {"int": ctypes.c_int, "int64_t": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double}


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
    kind = (parameter.split() or [""])[0]
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
