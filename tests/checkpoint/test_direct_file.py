# SPDX-License-Identifier: Apache-2.0
"""Files written past the page cache, on file systems that allow it and on others."""

import ctypes
import errno
import mmap
import os
import random

import pytest

from tests.checkpoint.writer_process import checksum
from zaya_plugin.checkpoint import direct_file, manifest
from zaya_plugin.checkpoint.direct_file import ALIGNMENT, DirectFiles

MEMORY = memoryview(random.Random(1).randbytes(5 * 2**16 + 7))


@pytest.fixture
def files(monkeypatch):
    monkeypatch.setattr(direct_file, "PIECE", 2**16)
    return DirectFiles()


def slices(sizes) -> list[tuple[int, int]]:
    """Slices of these sizes, in an order that is not that of the memory."""
    found, end = [], len(MEMORY)
    for size in sizes:
        end -= size
        found.append((end, size))
    return found


@pytest.mark.parametrize("sizes", [[], [1], [2**16], [ALIGNMENT - 1, 0, 2], [3] * 2000, [7, 3 * 2**16, 5, 2**16 + 1]])
def test_the_file_has_the_slices_in_their_order(files, tmp_path, sizes):
    path, parts, seen = tmp_path / "file", slices(sizes), []
    path.write_bytes(b"longer, and from before" * 10**5)
    wanted = b"".join(MEMORY[start : start + size] for start, size in parts)
    for _ in range(2):  # with the blocks of the file before
        written = files.write(path, (MEMORY[start : start + size] for start, size in parts), seen.append)
        assert path.read_bytes() == wanted
        assert written == {"bytes": len(wanted), "xxh3_128": checksum(wanted)} == manifest.describe(path)
    assert sum(seen) == 2 * len(wanted) and 0 not in seen
    assert files.write(path, iter([wanted[:9], memoryview(wanted)[9:]])) == written
    assert path.read_bytes() == wanted


@pytest.mark.parametrize(("refuses", "code"), [("open", errno.EINVAL), ("pwrite", errno.EINVAL), ("open", 95)])
def test_a_file_system_without_direct_writes(files, tmp_path, monkeypatch, refuses, code):
    system, flags = {name: getattr(os, name) for name in ("open", "pwrite")}, []

    def refusing_open(path, asked, *mode):
        flags.append(asked & os.O_DIRECT)
        if asked & os.O_DIRECT:
            raise OSError(code, "refused")
        return system["open"](path, asked, *mode)

    def refusing_write(file, *what):
        flags.append(direct_file.fcntl.fcntl(file, direct_file.fcntl.F_GETFL) & os.O_DIRECT)
        if flags[-1]:
            raise OSError(code, "refused")
        return system["pwrite"](file, *what)

    monkeypatch.setattr(os, refuses, {"open": refusing_open, "pwrite": refusing_write}[refuses])
    files.write(tmp_path / "file", [MEMORY])
    assert (tmp_path / "file").read_bytes() == MEMORY
    assert flags[0] == os.O_DIRECT and flags[-1] == 0


def test_short_writes_are_continued_and_errors_are_not_hidden(files, tmp_path, monkeypatch):
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: write(file, data[: max(1, len(data) // 3)], place))
    files.write(tmp_path / "file", [MEMORY])
    assert (tmp_path / "file").read_bytes() == MEMORY

    def full(file, data, place):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        files.write(tmp_path / "file", [MEMORY])
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: 0)
    with pytest.raises(OSError, match="writes nothing"):
        files.write(tmp_path / "file", [MEMORY])


def test_any_write_that_fails_fails_the_file(files, tmp_path, monkeypatch):
    """Megatron-core noticed a failure in the last of its buckets alone;
    in this one two threads write blocks in turn.
    """
    write, fails = os.pwrite, set()

    def failing(file, data, place):
        if place in fails:
            raise OSError(errno.EIO, "Input/output error")
        return write(file, data, place)

    monkeypatch.setattr(os, "pwrite", failing)
    for place in range(0, len(MEMORY), direct_file.PIECE):
        fails.add(place)
        with pytest.raises(OSError, match="Input/output error"):
            files.write(tmp_path / "file", [MEMORY[: 3 * 2**16 + 1], MEMORY[3 * 2**16 + 1 :]])
        fails.clear()
    written = files.write(tmp_path / "file", [MEMORY])
    assert manifest.describe(tmp_path / "file") == written, "the blocks of a failed file are free again"


def test_the_page_cache_is_left_alone(files, tmp_path):
    path = tmp_path / "file"
    try:
        os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("this file system has no direct writes")
    files.write(path, [MEMORY])
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        pages = (ctypes.c_ubyte * -(-len(MEMORY) // mmap.PAGESIZE))()
        start = ctypes.c_char.from_buffer(mapped)
        assert ctypes.CDLL(None).mincore(ctypes.byref(start), ctypes.c_size_t(len(MEMORY)), pages) == 0
        del start
    assert not any(page & 1 for page in pages)
