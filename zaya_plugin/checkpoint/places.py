# SPDX-License-Identifier: Apache-2.0
"""The places of a run's checkpoints: `checkpoint.path`, which all nodes see, and `checkpoint.local_path` of each node.

Imports no torch: the processes that write and upload checkpoints need only this.
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import xxhash

from zaya_plugin.checkpoint import manifest
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.storage_probe import StorageProbe

PARTIAL = ".partial"  # end of the name of a file that is being uploaded
QUICK = 0.25  # seconds of transfer between two waits, so that a limit also holds over short times


def local_folder(local_path: str | os.PathLike, directory: str | os.PathLike) -> Path:
    """Return this run's folder below `local_path`; its name is made from `directory`, the checkpoints at the shared path,
    so that runs that share a local disk do not meet.
    """
    real = os.path.realpath(directory)
    name = "-".join(Path(real).parts[-2:]).strip("/")
    return Path(local_path) / f"{name}-{xxhash.xxh3_64_hexdigest(real.encode())[:8]}"


def require_answer(path: str | os.PathLike, key: str, seconds: float = 60) -> None:
    """Check that a directory of checkpoints can be listed, and that its manifests answer, with or without an error.

    Raises:
        ValueError: it does not answer within `seconds`, or cannot be listed.
    """
    probe = StorageProbe(path, "read", manifest.NAME)
    probe.ask()
    answer = probe.answer(seconds)
    probe.close()
    fix = "make it readable again; nothing was started or changed"
    if answer is None:
        problem = f"does not answer within {seconds:g} s"
        raise mistake(key, path, problem=problem, allowed="a file system that answers", fix=fix)
    if answer and answer["errno"] not in (errno.ENOENT, errno.ENOTDIR):
        problem = f"cannot be read ({path}: {answer['text']})"
        raise mistake(key, path, problem=problem, allowed="a directory of checkpoints, or none", fix=fix)


def upload(
    source: Path,
    target: Path,
    expected: Mapping,
    limit: float | None = None,
    progress: Callable[[int], None] = lambda count: None,
) -> None:
    """Copy a file of a checkpoint to another file system, read it back there, and give it its name only if it is right.

    Until then it is named `<target>.<process>.partial`. A target that is there already and right is left as it is.

    Args:
        source: the file; target: its path at the other place, in a folder that exists.
        expected: its size and checksum, the manifest's {"bytes": ..., "xxh3_128": ...}.
        limit: bytes a second, for writing and for reading back; None: as fast as it goes.
        progress: called with the bytes of each piece, once written and once read back; what it raises ends the upload.

    Raises:
        OSError: a file cannot be read or written. ValueError: the source or what arrived is not as expected.
            The partial file is removed.
    """
    pace = Pace(limit)

    def passed(count: int) -> None:
        progress(count)
        pace(count)

    with contextlib.suppress(FileNotFoundError):
        if target.stat().st_size == expected["bytes"] and _stored(target, passed, pace.piece) == expected:
            return
    partial = target.with_name(f"{target.name}.{os.getpid()}{PARTIAL}")  # another process may upload the same
    try:
        with open(partial, "wb", buffering=0) as written:
            stored = manifest.describe(source, passed, pace.piece, written)
            os.fsync(written.fileno())
        if stored != expected:
            raise ValueError(_differs(source, stored, expected))
        if (stored := _stored(partial, passed, pace.piece)) != expected:
            raise ValueError(_differs(target, stored, expected))
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


class Pace:
    """Waits so that bytes pass at no more than `limit` a second on average.

    Attributes:
        piece: bytes to transfer between two calls.
    """

    def __init__(self, limit: float | None):
        self.limit = limit
        self.piece = manifest.PIECE if limit is None else max(4096, min(manifest.PIECE, int(limit * QUICK)))
        self.passed, self.began = 0, time.monotonic()

    def __call__(self, count: int) -> None:
        """Wait until `count` more bytes may have passed."""
        self.passed += count
        if self.limit is not None:
            time.sleep(max(0.0, self.began + self.passed / self.limit - time.monotonic()))


def _stored(path: Path, progress: Callable[[int], None], piece: int) -> dict:
    """Return size and checksum of what the storage holds: pages that this node has cached are dropped before."""
    _drop_cached(path)
    try:
        return manifest.describe(path, progress, piece)
    finally:
        _drop_cached(path)


def _drop_cached(path: Path) -> None:
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _differs(path: Path, stored: Mapping, expected: Mapping) -> str:
    return (
        f"{path} has {stored['bytes']} bytes with the checksum {stored['xxh3_128']}, its manifest states "
        f"{expected['bytes']} and {expected['xxh3_128']}"
    )
