# SPDX-License-Identifier: Apache-2.0
"""Writes a file past the page cache where the file system allows it (O_DIRECT).

Filling the page cache takes most of the processor time of a save, and memory that other programs use. A small block is
filled instead, and several are written at a time, while the next one is filled. Imports no torch.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import xxhash

PIECE = 16 * 2**20  # bytes read or written at once
AT_ONCE = 2  # writes in flight
ALIGNMENT = 4096  # of memory, place and length of a direct write; no disk asks for more
REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)  # errors of a file system without direct writes


class DirectFiles:
    """Writes files, one after the other, with the same blocks: AT_ONCE + 1 of PIECE bytes."""

    def __init__(self):
        self._blocks = [memoryview(mmap.mmap(-1, PIECE)) for _ in range(AT_ONCE + 1)]
        self._alone = threading.Lock()

    def write(
        self, path: Path, parts: Iterable[bytes | memoryview], progress: Callable[[int], None] = lambda count: None
    ) -> dict:
        """Write a file of `parts`, one behind the other, and make it durable. Return its bytes and checksum, as of the
        manifest. Another thread takes the parts, ahead of the writing.

        progress: called with the bytes of each block; what it raises ends the writing.

        Raises:
            OSError: the file cannot be written; a part of it may remain.
        """
        with self._alone:
            return self._write(path, parts, progress)

    def _write(self, path: Path, parts: Iterable, progress: Callable[[int], None]) -> dict:
        digest, size = xxhash.xxh3_128(), 0
        descriptor = _open(path)
        try:
            with ThreadPoolExecutor(AT_ONCE + 1) as threads:
                flying: deque[Future] = deque()
                blocks = self._filled(parts)
                next_block, number = threads.submit(next, blocks, 0), 0
                while filled := next_block.result():
                    if len(flying) == AT_ONCE:
                        flying.popleft().result()
                    next_block = threads.submit(next, blocks, 0)  # into the block of the write that has just ended
                    block, number = self._blocks[number % len(self._blocks)], number + 1
                    digest.update(block[:filled])
                    flying.append(threads.submit(_write_at, descriptor, block[: filled + -filled % ALIGNMENT], size))
                    size += filled
                    progress(filled)
                for future in flying:
                    future.result()
            os.ftruncate(descriptor, size)  # the last write was longer, by its alignment
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        return {"bytes": size, "xxh3_128": digest.hexdigest()}

    def _filled(self, parts: Iterable[bytes | memoryview]) -> Iterator[int]:
        """Fill the blocks in turn and yield the bytes of each; only the last one is not full."""
        number, filled = 0, 0
        for part in map(memoryview, parts):
            while part:
                block = self._blocks[number % len(self._blocks)]
                count = min(len(part), len(block) - filled)
                block[filled : filled + count] = part[:count]
                part, filled = part[count:], filled + count
                if filled == len(block):
                    yield filled
                    number, filled = number + 1, 0
        if filled:
            yield filled


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
