# SPDX-License-Identifier: Apache-2.0
"""Reads parts of tensors from a torch distributed checkpoint, without reading the whole tensor or starting ranks.

A checkpoint's index states for each tensor its boxes (an offset and a size in every axis) and for each box a range of
bytes of a file. That range is an archive as `torch.save` writes it, with the values uncompressed in one place.
"""

from __future__ import annotations

import functools
import io
import math
import os
import pickle
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from zaya_plugin.checkpoint.stored_tensor import record_start
from zaya_plugin.ground.errors import mistake

Indices = tuple[int, ...]
_STORAGES = {
    "FloatStorage": torch.float32,
    "DoubleStorage": torch.float64,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
    "UntypedStorage": None,  # the tensor's own type follows
}


@dataclass(frozen=True)
class Archive:
    """A range of bytes of a file that holds one tensor or object."""

    path: Path
    offset: int
    length: int

    def content(self) -> np.ndarray:
        """Return its bytes."""
        read = np.empty(self.length, np.uint8)
        read_into(self.path, self.offset, read)
        return read


@dataclass(frozen=True)
class Box:
    """A part of a tensor: its offset and its size in every axis, and the archive with its values."""

    offset: Indices
    sizes: Indices
    archive: Archive

    @functools.cached_property
    def place(self) -> tuple[torch.dtype, int]:
        """The type of its values and their place in the file."""
        return values_of(self.archive, self.sizes)

    def values(self, low: Indices, sizes: Indices) -> np.ndarray:
        """Return the values of a box that lies within this one, as bits. low: its offset in the whole tensor.

        One contiguous range is read: along the first axis with more than one element only what is asked for, along
        later axes everything.
        """
        dtype, start = self.place
        low = tuple(a - b for a, b in zip(low, self.offset, strict=True))
        axis = next((axis for axis, size in enumerate(sizes) if size > 1), len(sizes) - 1)
        strides = [math.prod(self.sizes[axis + 1 :]) for axis in range(len(sizes))]
        first = sum(a * stride for a, stride in zip(low[: axis + 1], strides, strict=False))
        shape = (*sizes[: axis + 1], *self.sizes[axis + 1 :])
        read = np.empty(shape, elements(dtype))
        read_into(self.archive.path, start + first * read.itemsize, read.reshape(-1).view(np.uint8))
        rest = zip(low[axis + 1 :], sizes[axis + 1 :], strict=True)
        return read[(*[slice(None)] * (axis + 1), *(slice(a, a + n) for a, n in rest), ...)]


def elements(dtype: torch.dtype) -> np.dtype:
    """Return a numpy type for the elements of a torch type, as bits; numpy has no bfloat16."""
    return np.dtype(f"V{dtype.itemsize}")


def common_box(a: tuple[Indices, Indices], b: tuple[Indices, Indices]) -> tuple[Indices, Indices] | None:
    """Return the intersection of two boxes, each as (offset, sizes); None if it is empty."""
    low = tuple(map(max, a[0], b[0]))
    sizes = tuple(min(p + m, q + n) - start for p, m, q, n, start in zip(a[0], a[1], b[0], b[1], low, strict=True))
    return (low, sizes) if all(size > 0 for size in sizes) else None


def pieces(shape: Indices, element_bytes: int, most_bytes: int) -> Iterator[tuple[Indices, Indices]]:
    """Yield offset and sizes of boxes of at most `most_bytes` that together are a tensor: whole rows of its first axis,
    of the second one where a row of the first is too large, and so on. A single element may be larger.
    """
    if not shape or 0 in shape:
        yield (0,) * len(shape), shape
        return
    axis = next(
        axis for axis in range(len(shape)) if _row(shape, axis) * element_bytes <= most_bytes or axis == len(shape) - 1
    )
    count = max(1, most_bytes // (_row(shape, axis) * element_bytes))
    for lead in np.ndindex(*shape[:axis]):
        for start in range(0, shape[axis], count):
            rest = shape[axis + 1 :]
            yield (*lead, start, *(0 for _ in rest)), (*(1 for _ in lead), min(count, shape[axis] - start), *rest)


def _row(shape: Indices, axis: int) -> int:
    return math.prod(shape[axis + 1 :])


def values_of(archive: Archive, shape: Indices) -> tuple[torch.dtype, int]:
    """Return the type of an archive's values and their place in its file.

    Raises:
        ValueError: it is not an archive of one contiguous tensor of `shape`; the text names file and place.
    """
    try:
        with open(archive.path, "rb", buffering=0) as file:
            view = io.BufferedReader(_View(file.fileno(), archive.offset, archive.length))
            with zipfile.ZipFile(view) as names:
                by_end = {member.filename.partition("/")[2]: member for member in names.infolist()}
                dtype, begin, stored, strides = _Description(io.BytesIO(names.read(by_end["data.pkl"]))).load()
                record = by_end["data/0"]
            start = record_start(file.fileno(), archive.offset + record.header_offset)
    except (KeyError, TypeError, ValueError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise _unreadable(archive, f"no tensor as torch.save writes it ({error})") from error
    except OSError as error:
        raise _unreadable(archive, error.strerror or str(error)) from error
    whole = math.prod(shape) * dtype.itemsize
    contiguous = all(n == 1 or s == _row(shape, axis) for axis, (n, s) in enumerate(zip(shape, strides, strict=False)))
    stores = record.compress_type == zipfile.ZIP_STORED and record.file_size == whole
    if tuple(stored) != shape or begin or not contiguous or not stores:
        raise _unreadable(archive, f"its index states a contiguous tensor of {shape}, it holds one of {tuple(stored)}")
    return dtype, start


def _unreadable(archive: Archive, problem: str) -> ValueError:
    return mistake(f"{archive.path}, byte {archive.offset}", problem=problem, fix="another checkpoint")


def read_into(path: Path, start: int, data: bytearray | np.ndarray) -> None:
    """Fill `data`, of bytes, from a file.

    Raises:
        ValueError: the file is shorter, or cannot be read.
    """
    left = memoryview(data)
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(start)
            while left:
                if not (count := file.readinto(left)):
                    raise mistake(str(path), problem=f"ends before byte {start + len(data)}, where values should end")
                left = left[count:]
    except OSError as error:
        raise mistake(str(path), problem=f"cannot be read ({error.strerror})") from error


class _View(io.RawIOBase):
    """A range of bytes of a file as a file."""

    def __init__(self, descriptor: int, start: int, length: int):
        self.descriptor, self.start, self.length, self.at = descriptor, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self.at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.at, os.SEEK_END: self.length}[whence]
        if self.at < 0:
            raise ValueError("before the begin")
        return self.at

    def readinto(self, buffer) -> int:
        read = os.pread(self.descriptor, max(0, min(len(buffer), self.length - self.at)), self.start + self.at)
        buffer[: len(read)] = read
        self.at += len(read)
        return len(read)


class _Description(pickle.Unpickler):
    """The pickle of a tensor without its values: (dtype, first element in the storage, shape, strides)."""

    def find_class(self, module: str, name: str):
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return lambda dtype, begin, shape, strides, *rest: (dtype, begin, shape, strides)
        if (module, name) == ("torch._utils", "_rebuild_tensor_v3"):  # of types without a storage class of their own
            return lambda _, begin, shape, strides, grad, hooks, dtype, *rest: (dtype, begin, shape, strides)
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return _STORAGES[name]
        raise pickle.UnpicklingError(f"{module}.{name}")

    def persistent_load(self, saved: tuple):
        return saved[1]
