# SPDX-License-Identifier: Apache-2.0
"""Launches the Triton kernels of some operators: from code objects that the package ships where one fits the call,
otherwise as the installed Triton compiles them.

Triton compiles a kernel for each combination of constants, options, types of arguments, and properties of arguments. On
AMD two properties change the code: D, an address or an integer is a multiple of 16; S, the storage of a tensor is
smaller than 2 GiB, so that buffer instructions reach all of it. A shipped object fits a call that has its constants,
options and types, and at least its properties: they are verified at every call. Of several that fit, the one with most
properties is taken.

`hip_ops/shipped/<target>/` holds the objects (.hsaco) and their manifest (tools/ship.py makes them): for each the
sha256, the kernel, what it was compiled for, its arguments in order, and how it is launched. The objects are used as
long as their sha256 and the sources of their kernels are those of the manifest and HIP_OPS_LIBRARY=source does not request a
compilation. A launch calls functions of the HIP runtime that torch has mapped, and needs neither a compiler nor Triton.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hip_ops.errors import NotCompiled, warn_once
from hip_ops.runtime.build import LIBRARY_VARIABLE, PACKAGE, files_digest, requested_library, shipped_folder
from hip_ops.runtime.compilers import AMD_ARCHITECTURES
from hip_ops.runtime.launch import architecture, on
from hip_ops.runtime.launchers import bind_runtime

OBJECTS_MANIFEST = "objects.json"
# The files that hold device code of the shipped kernels, below hip_ops.
KERNEL_SOURCES = (
    "ops/grouped_product/expert_tiles.py",
    "ops/grouped_product/triton_kernels.py",
    "ops/router_mlp/triton_kernels.py",
    "runtime/tiles.py",
)
POINTERS = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64",
}  # fmt: skip
FORMATS = {"i32": "i", "i64": "q", "fp32": "f"}  # of struct, with native alignment; pointers are Q
MULTIPLE = 16  # of the property D
SMALL_BYTES = 2**31  # of a storage without the property S, at least
MAX_REMEMBERED_CALLS = 4096
# hipModuleLaunchKernel's list `extra`: the address and the size of the packed arguments, then the end.
ARGUMENT_BUFFER, ARGUMENT_SIZE, END = 1, 2, 3

_refused: dict[str, str] = {}  # targets whose objects could not be loaded, and why


class Call(NamedTuple):
    """The form of a call, which decides the code that runs, or of an object. keywords: constants and options of
    Triton's compiler. arguments: type and properties of each.
    """

    kernel: str
    keywords: tuple[tuple[str, Any], ...]
    arguments: tuple[tuple[str, str], ...]

    def covers(self, other: Call) -> bool:
        """Return whether the code for this call computes `other` too: it may assume fewer properties."""
        if (self.kernel, {*self.keywords}) != (other.kernel, {*other.keywords}):
            return False
        pairs = zip(self.arguments, other.arguments, strict=True)
        return all(kind == its and {*required} <= {*has} for (kind, required), (its, has) in pairs)

    def __str__(self) -> str:
        return f"{self.kernel} ({', '.join(f'{name}={value}' for name, value in self.keywords)})"


def described(argument: Any) -> tuple[str, str]:
    """Return the type of an argument, as Triton names it, and those of the properties D and S that it has."""
    if isinstance(argument, Tensor):
        small = argument.untyped_storage().nbytes() < SMALL_BYTES
        properties = ("D" if argument.data_ptr() % MULTIPLE == 0 else "") + ("S" if small else "")
        return POINTERS.get(argument.dtype, str(argument.dtype)), properties
    if isinstance(argument, int):
        kind = "i32" if -(2**31) <= argument < 2**31 else "i64"
        return kind, "D" if argument % MULTIPLE == 0 else ""
    return "fp32", ""


def call_of(kernel: str, arguments: Sequence[Any], keywords: dict[str, Any]) -> Call:
    return Call(kernel, tuple(keywords.items()), tuple(map(described, arguments)))


@dataclass(frozen=True)
class CodeObject:
    """One shipped object. arguments: name, type and properties of each, in order; the kernel takes `trailing_pointers`
    null pointers behind them, which Triton uses for scratch memory. shared: bytes of dynamic LDS. threads: of a block.
    """

    file: str
    sha256: str
    operator: str  # folder of hip_ops/ops
    kernel: str
    keywords: dict[str, Any]
    arguments: list[list[str]]
    trailing_pointers: int
    shared: int
    threads: int

    @functools.cached_property
    def call(self) -> Call:
        """Return what the object was compiled for."""
        described = tuple((kind, properties) for _, kind, properties in self.arguments)
        return Call(self.kernel, tuple(self.keywords.items()), described)

    @functools.cached_property
    def layout(self) -> str:
        """Return the format of the packed arguments, for struct.pack."""
        return "@" + "".join(FORMATS.get(kind, "Q") for _, kind, _ in self.arguments) + "Q" * self.trailing_pointers

    def packed(self, arguments: Sequence[Any]) -> bytes:
        """Return the bytes that the kernel reads its arguments from."""
        values = [value.data_ptr() if isinstance(value, Tensor) else value for value in arguments]
        return struct.pack(self.layout, *values, *[0] * self.trailing_pointers)


class CodeObjects:
    """The shipped objects of a target. `functions`: by device index and file, as they were loaded there.
    `failures`: by form of a call that no object fits, why the installed Triton could not compile it, else "".
    """

    def __init__(self, folder: Path, manifest: dict):
        self.folder, self.sha256 = folder, manifest["sha256"]
        objects = [CodeObject(**entry) for entry in manifest["objects"]]
        self.all = sorted(objects, key=lambda one: -sum(len(properties) for *_, properties in one.arguments))
        self.operators = {one.operator for one in self.all}
        self.functions: dict[int | None, dict[str, ctypes.c_void_p]] = {}
        self.failures: dict[tuple[Call, tuple[bool, ...]], str] = {}
        self._images: list[bytes] = []
        self.fitting = functools.lru_cache(MAX_REMEMBERED_CALLS)(self._fitting)

    def _fitting(self, call: Call) -> CodeObject | None:
        """Return the object for a call, or None where none fits."""
        return next((one for one in self.all if one.call.covers(call)), None)

    def launch(self, one: CodeObject, grid: Sequence[int], arguments: Sequence[Any], device: torch.device) -> None:
        """Launch an object on the current stream of `device`, which is the current device. Raises RuntimeError with
        HIP's message.
        """
        hip, function = _hip(), self.functions[device.index][one.file]
        packed = one.packed(arguments)
        buffer, size = ctypes.create_string_buffer(packed, len(packed)), ctypes.c_size_t(len(packed))
        extra = (ctypes.c_void_p * 5)(
            ARGUMENT_BUFFER, ctypes.addressof(buffer), ARGUMENT_SIZE, ctypes.addressof(size), END
        )
        stream = torch.cuda.current_stream(device).cuda_stream
        shape = (*(*grid, 1, 1)[:3], one.threads, 1, 1)
        _checked(one, hip.hipModuleLaunchKernel(function, *shape, one.shared, stream, None, extra))

    def load(self, device: torch.device) -> None:
        """Load all objects on the current device, `device`, at once: while a graph is captured none can be loaded.
        Raises RuntimeError with HIP's message, OSError, and ValueError where the process has not one HIP runtime.
        """
        hip, functions = _hip(), {}
        for one in self.all:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            self._images.append((self.folder / one.file).read_bytes())  # kept: HIP may read an image later
            _checked(one, hip.hipModuleLoadData(ctypes.byref(module), self._images[-1]))
            _checked(one, hip.hipModuleGetFunction(ctypes.byref(function), module, one.kernel.encode()))
            functions[one.file] = function
        self.functions[device.index] = functions


def _checked(one: CodeObject, code: int) -> None:
    """Raise RuntimeError with HIP's message for a code other than 0, and clear HIP's last error, which torch would
    otherwise report for a later call of its own (HIP 7 keeps it until it is read).
    """
    if code:
        _hip().hipGetLastError()
        raise RuntimeError(f"hip_ops: {one.file} failed with code {code}: {_hip().hipGetErrorString(code).decode()}")


@functools.cache
def _hip() -> ctypes.CDLL:
    """Return the HIP runtime of the process, with the types of the functions that are called. Raises ValueError where
    the process has not one runtime, that of torch.
    """
    hip = bind_runtime()
    pointer, number = ctypes.c_void_p, ctypes.c_uint
    hip.hipModuleLoadData.argtypes = (pointer, ctypes.c_char_p)
    hip.hipModuleGetFunction.argtypes = (pointer, pointer, ctypes.c_char_p)
    hip.hipModuleLaunchKernel.argtypes = (pointer, *(number,) * 7, pointer, pointer, pointer)
    hip.hipGetErrorString.argtypes, hip.hipGetErrorString.restype = (ctypes.c_int,), ctypes.c_char_p
    return hip


def kernels_digest() -> str:
    """Return the sha256 over the sources of the shipped kernels."""
    return files_digest(PACKAGE / name for name in KERNEL_SOURCES)


def objects_digest(checksums: Sequence[str]) -> str:
    """Return the sha256 that stands for all objects: equal texts mean the same code."""
    return hashlib.sha256("".join(sorted(checksums)).encode()).hexdigest()


@functools.lru_cache
def _read(folder: Path) -> tuple[CodeObjects | None, str]:
    """Return the objects in `folder`, or None and why they must not run. Reads all files, so once a process."""
    try:
        manifest = json.loads((folder / OBJECTS_MANIFEST).read_text())
    except FileNotFoundError:
        return None, f"no code objects are shipped for {folder.name}"
    objects = CodeObjects(folder, manifest)
    for one in objects.all:
        path = folder / one.file
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != one.sha256:
            return None, f"the shipped object {path} is damaged; install the package again"
    if objects.sha256 != objects_digest([one.sha256 for one in objects.all]):
        return None, f"the manifest {folder / OBJECTS_MANIFEST} is damaged; install the package again"
    if manifest["sources"] != kernels_digest():
        return None, "the kernels' sources are not those of the shipped objects"
    return objects, ""


def shipped_objects(target: str) -> tuple[CodeObjects | None, str]:
    """Return the shipped objects of a target and "", or None and why Triton compiles an AMD target's kernels."""
    if target not in AMD_ARCHITECTURES:
        return None, ""
    try:
        if requested_library() == "source":
            return None, f"{LIBRARY_VARIABLE}=source, so the verified objects are not used"
    except ValueError as error:
        return None, str(error)
    return (None, _refused[target]) if target in _refused else _read(shipped_folder(target))


def objects_for(device: torch.device) -> CodeObjects | None:
    """Return the objects that run on `device`, or None."""
    return None if torch.version.hip is None else shipped_objects(architecture(device))[0]


def loaded_objects(device: torch.device) -> CodeObjects | None:
    """Return the objects that run on `device`, which is the current one, loaded there; or None, with a warning where
    shipped ones cannot be used. `shipped_objects` says why.
    """
    if torch.version.hip is None:
        return None
    target = architecture(device)
    objects, why_not = shipped_objects(target)
    if objects is not None and device.index not in objects.functions:
        try:
            objects.load(device)
        except (OSError, RuntimeError, ValueError) as error:
            objects, why_not = None, f"the shipped objects cannot be loaded: {error}"
            _refused[target] = why_not
    if why_not:
        _announce(why_not, f"hip_ops: the installed Triton compiles kernels for {target}, unverified: {why_not}")
    return objects


def serves(operator: str, device: torch.device) -> bool:
    """Return whether objects of an operator, a folder of hip_ops/ops, are shipped for `device`."""
    return operator in getattr(objects_for(device), "operators", ())


def objects_identity(device: torch.device) -> str | None:
    """Say which objects run on an AMD device; None on another one. Equal texts mean the same code."""
    if torch.version.hip is None:
        return None
    objects = objects_for(device)
    return f"shipped, sha256 {objects.sha256}" if objects else "none"


def objects_note(target: str) -> str:
    """Say which Triton kernels run from shipped objects on AMD's `target`, or why Triton compiles them."""
    objects, why_not = shipped_objects(target)
    if objects is None:
        return f"compiled by the installed Triton: {why_not}"
    return (
        f"{len(objects.all)} of {', '.join(sorted(objects.operators))} shipped with the package, "
        f"sha256 {objects.sha256}"
    )


@functools.cache
def _compiled_by_triton(operator: str, kernel: str) -> Any:
    """Return Triton's function; its module imports triton."""
    return getattr(importlib.import_module(f"hip_ops.ops.{operator}.triton_kernels"), kernel)


def _compile(operator: str, kernel: str, grid: tuple[int, ...], arguments: Sequence[Any], keywords: dict) -> str:
    """Compile a kernel with the installed Triton, and load it, without a launch. Return why Triton cannot, or "".

    Raises what may be another time: memory that is short, and errors of the device.
    """
    try:
        compiled = _compiled_by_triton(operator, kernel).warmup(*arguments, grid=grid, **keywords)
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    from triton import OutOfResources

    try:
        if compiled is not None:  # as Triton's interpreter and hooks return it
            _ = compiled.run  # Triton loads the code when this is read
    except OutOfResources as error:
        return f"{type(error).__name__}: {error}"
    return ""


def launch_triton_kernel(
    operator: str, kernel: str, grid: tuple[int, ...], *arguments: Any, device: torch.device, **keywords: Any
) -> None:
    """Launch a kernel of hip_ops/ops/<operator>/triton_kernels.py on `device`; an empty grid launches nothing.

    arguments: those that are no constants, in order. keywords: constants, and options of Triton's compiler. Raises
    NotCompiled where objects are shipped for the device, none fits, and the installed Triton cannot compile the kernel:
    the self-check has passed without it then. Nothing was launched, so another version may run; after an error of a
    launch none may, because a sum that was added to would get it twice.
    """
    if not all(grid):
        return
    with on(device):
        objects = loaded_objects(device)
        if objects is None:
            _compiled_by_triton(operator, kernel)[grid](*arguments, **keywords)
            return
        call = call_of(kernel, arguments, keywords)
        one = objects.fitting(call)
        if one is not None:
            objects.launch(one, grid, arguments, device)
            return
        _announce(
            str(call),
            f"hip_ops: no shipped object fits {call}; the installed Triton compiles it, unverified. "
            "`python -m tools.ship` in a checkout ships the objects of all recipes in recipes/",
        )
        form = (
            call,
            tuple(value == 1 for value in arguments if isinstance(value, int)),
        )  # Triton compiles a 1 as constant
        if form not in objects.failures:
            objects.failures[form] = _compile(operator, kernel, grid, arguments, keywords)
        if objects.failures[form]:
            raise NotCompiled(f"hip_ops: no shipped object fits {call}, and Triton fails: {objects.failures[form]}")
        _compiled_by_triton(operator, kernel)[grid](*arguments, **keywords)


def _announce(key: str, text: str) -> None:
    """Write a warning once, by the first process of a machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        warn_once((key,), "%s", text)
