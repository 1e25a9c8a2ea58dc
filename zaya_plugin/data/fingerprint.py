# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of datasets: 16 hexadecimal digits that change when the data changes, cheap enough for every start.

Read are all of the index and, of tokens and marks, everything up to WHOLE_BYTES or else BLOCK_COUNT stretches that are
spread over the file. So a change that keeps the size of a larger file is noticed only where it meets a stretch; `zaya
data check` compares every byte.
"""

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache

import xxhash

MARKS = ".marks"
READ_BYTES = 16 << 20
WHOLE_BYTES, BLOCK_COUNT, BLOCK_BYTES = 64_000_000, 256, 1 << 16


def file_xxh3(path: str | os.PathLike) -> str:
    """Return the xxh3 of all of a file, as 16 hexadecimal digits."""
    digest = xxhash.xxh3_64()
    with open(path, "rb") as stream:
        while piece := stream.read(READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def fingerprint(prefix: str) -> str:
    """Return the fingerprint of `<prefix>.bin`, `.idx` and, of chats, `.marks`; a file that did not change is read once
    by a process.
    """
    return _fingerprint(prefix, tuple(_identity(prefix + suffix) for suffix in (".bin", ".idx", MARKS)))


def content_fingerprint(prefixes: Sequence[str]) -> str:
    """Return the fingerprint of several datasets in this order."""
    return xxhash.xxh3_64_hexdigest(" ".join(map(fingerprint, prefixes)).encode())


def _identity(path: str) -> tuple | None:
    try:
        stat = os.stat(path)
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


@lru_cache(maxsize=1024)
def _fingerprint(prefix: str, files: tuple) -> str:
    digest = xxhash.xxh3_64(file_xxh3(prefix + ".idx").encode())
    for suffix, identity in ((".bin", files[0]), (MARKS, files[2])):
        if identity is not None:
            digest.update(f"{suffix} {identity[1]}".encode())
            with open(prefix + suffix, "rb", buffering=0) as stream:
                for begin, length in _stretches(identity[1]):
                    digest.update(os.pread(stream.fileno(), length, begin))
    return digest.hexdigest()


def _stretches(size: int) -> Iterator[tuple[int, int]]:
    """Yield the first byte and length of each stretch that is read of a file."""
    if size <= WHOLE_BYTES:
        yield from ((begin, READ_BYTES) for begin in range(0, size, READ_BYTES))
    else:
        yield from (((size - BLOCK_BYTES) * block // (BLOCK_COUNT - 1), BLOCK_BYTES) for block in range(BLOCK_COUNT))
