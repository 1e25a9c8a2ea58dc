# SPDX-License-Identifier: Apache-2.0
"""Writes slices of memory as a file, past the page cache where the file system allows it (O_DIRECT).

Filling the page cache takes most of the processor time of a save, and memory that other programs use, while the training
needs both. A small block is filled instead, and several are written at a time. Imports no torch.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

from zaya_plugin.checkpoint import manifest

AT_ONCE = 2  # writes in flight
ALIGNMENT = 4096  # of memory, place and length of a direct write; no disk asks for more
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)  # what a file system without direct writes says


class DirectFiles:
    """Writes files, one after the other, with the same blocks: AT_ONCE + 1 of manifest.PIECE bytes."""

    def __init__(self):
        self._blocks = [memoryview(mmap.mmap(-1, manifest.PIECE)) for _ in range(AT_ONCE + 1)]

    def write(
        self,
        path: Path,
        memory: memoryview,
        slices: Iterable[tuple[int, int]],
        progress: Callable[[int], None] = lambda size: None,
    ) -> dict:
        """Write a file and make it durable. Return its bytes and checksum, as of the manifest.

        slices: (start, length) in `memory`. progress: called with the bytes so far; what it raises ends the writing.

        Raises:
            OSError: the file cannot be written; a part of it may be there.
        """
        digest, size = xxhash.xxh3_128(), 0
        descriptor = _open(path)
        try:
            with ThreadPoolExecutor(AT_ONCE) as threads:
                flying: deque[Future] = deque()
                for number, batch in enumerate(_batches(slices, len(self._blocks[0]))):
                    if len(flying) == AT_ONCE:
                        flying.popleft().result()
                    block, filled = self._blocks[number % len(self._blocks)], 0
                    for start, length in batch:
                        block[filled : filled + length] = memory[start : start + length]
                        filled += length
                    digest.update(block[:filled])
                    flying.append(threads.submit(_write_at, descriptor, block[: filled + -filled % ALIGNMENT], size))
                    size += filled
                    progress(size)
                for each in flying:
                    each.result()
            os.ftruncate(descriptor, size)  # the last write was longer, by its alignment
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return {"bytes": size, "xxh3_128": digest.hexdigest()}


def _open(path: Path) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
    try:
        return os.open(path, flags | os.O_DIRECT, 0o644)
    except OSError as error:
        if error.errno not in REFUSED:
            raise
        return os.open(path, flags, 0o644)


def _write_at(descriptor: int, data: memoryview, place: int) -> None:
    while data:
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)  # before the call: another thread may change them
        try:
            count = os.pwrite(descriptor, data, place)
        except OSError as error:
            if error.errno not in REFUSED or not flags & os.O_DIRECT:
                raise
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # this file system takes no such write
            continue
        if not count:
            raise OSError(errno.EIO, "the file system writes nothing and states no error")
        data, place = data[count:], place + count


def _batches(slices: Iterable[tuple[int, int]], most: int) -> Iterable[list[tuple[int, int]]]:
    """Cut slices into batches of `most` bytes; the last one may be smaller."""
    batch, size = [], 0
    for start, length in slices:
        while length:
            some = min(length, most - size)
            batch.append((start, some))
            start, length, size = start + some, length - some, size + some
            if size == most:
                yield batch
                batch, size = [], 0
    if batch:
        yield batch
