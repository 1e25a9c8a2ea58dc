# SPDX-License-Identifier: Apache-2.0
"""The bytes around a tensor's values in a file of a torch distributed checkpoint.

Such a file holds each tensor as `torch.save` writes it: a zip archive whose largest record is the values. Where the
bytes around that record are known, the values can be written from any buffer, in pieces, by a program without torch.
"""

from __future__ import annotations

import functools
import math
import os
import zipfile
from collections.abc import Iterable, Iterator

import torch


@functools.lru_cache(maxsize=4096)
def around(dtype: torch.dtype, shape: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return the bytes before and after the values of a contiguous tensor, as `torch.save` writes them.

    They hold no checksum of the values; torch compares none, and a checkpoint's manifest has its own.
    """
    values = torch.empty(shape, dtype=dtype)
    memory = os.memfd_create("torch.save")
    try:
        # A hole in the place of the values, which takes no memory. A path would become the archive's name.
        with torch.serialization.skip_data(), os.fdopen(os.dup(memory), "wb") as file:
            torch.save(values, file)
        end = os.fstat(memory).st_size
        with zipfile.ZipFile(os.fdopen(os.dup(memory), "rb")) as archive:
            record = next(member for member in archive.infolist() if member.filename.endswith("/data/0"))
        start = record_start(memory, record.header_offset)
        after = start + values.nbytes
        return os.pread(memory, start, 0), os.pread(memory, end - after, after)
    finally:
        os.close(memory)


def archive_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the bytes that a tensor takes in a file."""
    return sum(map(len, around(dtype, shape))) + math.prod(shape) * dtype.itemsize


def archive(dtype: torch.dtype, shape: tuple[int, ...], values: Iterable) -> Iterator[bytes | memoryview]:
    """Yield what a file holds of a tensor. values: their bytes, in pieces."""
    before, after = around(dtype, shape)
    yield before
    yield from values
    yield after


def record_start(descriptor: int, header: int) -> int:
    """Return where an archive's record begins in a file, behind its header at the byte `header`."""
    fixed = os.pread(descriptor, 30, header)
    name, extra = (int.from_bytes(fixed[at : at + 2], "little") for at in (26, 28))
    return header + 30 + name + extra
