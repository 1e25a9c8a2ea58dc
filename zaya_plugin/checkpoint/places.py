# SPDX-License-Identifier: Apache-2.0
"""Where a checkpoint's files lie: `Place`, the only way in which checkpoints are written, listed and removed, and
`PosixPlace`, a path. Another kind of storage is a class with the same methods; a rank hands it to its writer process by
the name of its class and its address.

A run has one or two places: `checkpoint.path`, which all nodes see, and `checkpoint.local_path` of each node. Imports
no torch: the processes that write and upload checkpoints need only this.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import importlib
import io
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO, Protocol

import xxhash

from zaya_plugin.checkpoint.direct_file import PIECE, DirectFiles
from zaya_plugin.config.run_directory import MANIFEST
from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.storage_probe import StorageProbe
from zaya_plugin.ground.whole_file import listing, sync, write_whole

PARTIAL = ".partial"  # end of the name of a file that is being uploaded


def ignore(count: int) -> None:
    """Take a number of bytes and do nothing; for callers without a progress bar."""


class Place(Protocol):
    """A folder or a file of a storage, which need not exist. Errors are OSError (FileNotFoundError where nothing is,
    IsADirectoryError and NotADirectoryError where the other kind is, FileExistsError by `make` over a file), but no
    ConnectionError, by which the writer knows the end of its rank. Places of one address are equal and have one hash.

    Attributes:
        address: from which `type(place)(address)` makes an equal place in another process.
        path: for programs that read files by their path (torch, Megatron); None: the storage has no paths.
        name: last part of the address. parent: the folder of this place.
        renames: whether `commit` gives a folder another name without a copy of its content.
    """

    address: str
    path: Path | None
    name: str
    renames: bool

    @property
    def parent(self) -> Place: ...

    def __truediv__(self, name: str) -> Place:
        """Return the place `name` in this folder."""

    def list(self, sizes: bool = True) -> dict[str, int | None]:
        """Return the names in this folder: bytes of a file (0 where `sizes` is false), None for a folder."""

    def open(self, uncached: bool = False) -> BinaryIO:
        """Open this file for reading. uncached: what the storage holds, not what this node remembers of it."""

    def make(self) -> None:
        """Make this folder and those above it, unless they exist. A write into a folder that does not exist fails."""

    def write(
        self, parts: Iterable[bytes | memoryview], progress: Callable[[int], None] = ignore, *, direct: bool = False
    ) -> dict[str, int | str]:
        """Write this file, durable at the return. A failed write may leave a part of the file.

        Args:
            progress: called with the bytes of each part that was taken; what it raises ends the write.
            direct: the file is large, and this node will not read it again soon.

        Returns:
            its size and checksum, as the manifest has them: {"bytes": ..., "xxh3_128": ...}.
        """

    def put(self, content: bytes | str) -> None:
        """Write this small file, durable at the return. Readers see the old content or the new one, whole."""

    def commit(self, target: Place) -> None:
        """Give this folder or file, whose content is durable, the name `target` of the same storage, durable at the
        return. A storage without renames copies, and the manifest last: a folder without it is no checkpoint.
        """

    def remove(self) -> None:
        """Remove this file, or this folder with all in it; nothing where it does not exist. A storage without renames
        removes a folder's manifest first. Files of a folder that cannot be removed stay.
        """

    def lock(self, shared: bool = False) -> AbstractContextManager:
        """Return a lock on this file that ends with this process;
        a storage without locks returns one that holds nothing.

        Raises:
            BlockingIOError: another process has a lock that excludes it; where `shared` is true, this waits instead.
        """

    def free(self) -> str:
        """Return the free space for this place, for messages."""


class PosixPlace:
    """A path."""

    renames = True

    def __init__(self, address: str | os.PathLike):
        self.path = Path(address)
        self.address, self.name = str(self.path), self.path.name

    def __repr__(self) -> str:
        return self.address

    def __fspath__(self) -> str:
        return self.address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PosixPlace) and self.path == other.path

    def __hash__(self) -> int:
        return hash(self.path)

    @property
    def parent(self) -> PosixPlace:
        return PosixPlace(self.path.parent)

    def __truediv__(self, name: str) -> PosixPlace:
        return PosixPlace(self.path / name)

    def list(self, sizes: bool = True) -> dict[str, int | None]:
        return listing(self.path, sizes)

    def open(self, uncached: bool = False) -> BinaryIO:
        return _Uncached(self.path) if uncached else open(self.path, "rb", buffering=0)

    def make(self) -> None:
        self.path.mkdir(parents=True, exist_ok=True)

    def write(
        self, parts: Iterable[bytes | memoryview], progress: Callable[[int], None] = ignore, *, direct: bool = False
    ) -> dict[str, int | str]:
        if direct:
            return _direct_files().write(self.path, parts, progress)
        digest, size = xxhash.xxh3_128(), 0
        with open(self.path, "wb", buffering=0) as file:
            for part in parts:
                left = memoryview(part)
                while left:  # an unbuffered file may take a part
                    left = left[file.write(left) :]
                digest.update(part)
                size += len(part)
                progress(len(part))
            os.fsync(file.fileno())
        return {"bytes": size, "xxh3_128": digest.hexdigest()}

    def put(self, content: bytes | str) -> None:
        write_whole(self.path, content)

    def commit(self, target: Place) -> None:
        sync(self.path)
        self.path.rename(target.path)
        sync(target.path.parent)

    def remove(self) -> None:
        if self.path.is_dir() and not self.path.is_symlink():
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            self.path.unlink(missing_ok=True)

    def lock(self, shared: bool = False) -> AbstractContextManager:
        # Not the lock of ground/lock.py: a reader need not be allowed to write, and many read at a time. Without it a
        # reader whose checkpoint is removed misses files, which it names.
        # NFS requires a file that may be written for a lock that excludes others.
        file = open(self.path, "rb" if shared else "r+b")
        with contextlib.ExitStack() as undone:
            undone.callback(file.close)
            try:
                fcntl.flock(file, fcntl.LOCK_SH if shared else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise
            except OSError:
                pass  # a file system without locks
            if not os.path.samestat(os.fstat(file.fileno()), os.stat(self.path)):
                raise FileNotFoundError(errno.ENOENT, "was replaced while its lock was taken", self.address)
            undone.pop_all()
        return file

    def free(self) -> str:
        try:
            folder = next(folder for folder in (self.path, *self.path.parents) if folder.exists())
            room = os.statvfs(folder)
        except OSError as error:
            return f"its free space is not known: {error}"
        return f"{room.f_bavail * room.f_frsize / 2**30:.1f} GiB and {room.f_favail} files are free in {folder}"


class _Uncached(io.FileIO):
    """A file of which this node's page cache holds nothing, before and after."""

    def __init__(self, path: Path):
        super().__init__(path)
        self._drop()

    def close(self) -> None:
        if not self.closed:
            self._drop()
        super().close()

    def _drop(self) -> None:
        os.posix_fadvise(self.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@functools.cache
def _direct_files() -> DirectFiles:
    return DirectFiles()


def at(place: Place | str | os.PathLike) -> Place:
    """Return a path as a place; a place as it is."""
    return PosixPlace(place) if isinstance(place, (str, Path)) else place


def to_text(place: Place) -> str:
    """Return a place as a text, for another process.

    Raises:
        ValueError: the other process could not import the class.
    """
    kind = type(place)
    if kind.__module__ == "__main__" or "." in kind.__qualname__:
        problem = "the writer's process cannot import the class"
        raise mistake("place", f"{kind.__module__}.{kind.__qualname__}", problem=problem, allowed="a class of a module")
    return f"{kind.__module__}:{kind.__qualname__}:{place.address}"


def from_text(text: str) -> Place:
    """Return the place of `to_text`."""
    module, name, address = text.split(":", 2)
    return getattr(importlib.import_module(module), name)(address)


def read(place: Place) -> bytes:
    """Return the content of a file."""
    with place.open() as file:
        return file.read()


def names(place: Place) -> list[str]:
    """Return the names in a folder; none where it does not exist."""
    try:
        return list(place.list(sizes=False))
    except (FileNotFoundError, NotADirectoryError):
        return []


def exists(place: Place) -> bool:
    """Return whether a file exists, or a folder in its place. It is opened, because a network file system shows new
    names to a reader that opens them.
    """
    try:
        place.open().close()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except IsADirectoryError:
        pass
    return True


QUICK = 0.25  # seconds of transfer between two waits, so that a limit also holds over short times


def local_folder(local_path: str | os.PathLike, directory: str | os.PathLike) -> Path:
    """Return this run's folder below `local_path`; its name is made from `directory`, the checkpoints at the shared
    path, so that runs that share a local disk do not meet.
    """
    real = os.path.realpath(directory)
    name = "-".join(Path(real).parts[-2:]).strip("/")
    return Path(local_path) / f"{name}-{xxhash.xxh3_64_hexdigest(real.encode())[:8]}"


def require_answer(path: str | os.PathLike, key: str, seconds: float = 60) -> None:
    """Check that a directory of checkpoints can be listed, and that its manifests answer, with or without an error.

    Raises:
        ValueError: it does not answer within `seconds`, or cannot be listed.
    """
    probe = StorageProbe(path, "read", MANIFEST)
    probe.ask()
    answer = probe.answer(seconds)
    ended = probe.process.poll()
    probe.close()
    fix = "make it readable again; nothing was started or changed"
    if answer is None:
        problem = f"does not answer within {seconds:g} s"
        if ended is not None:
            problem = f"was not examined: the process that reads it ended with code {ended}"
        raise mistake(key, path, problem=problem, allowed="a file system that answers", fix=fix)
    if answer and answer["errno"] not in (errno.ENOENT, errno.ENOTDIR):
        problem = f"cannot be read ({path}: {answer['text']})"
        raise mistake(key, path, problem=problem, allowed="a directory of checkpoints, or none", fix=fix)


def upload(
    source: Place,
    target: Place,
    expected: Mapping,
    limit: float | None = None,
    progress: Callable[[int], None] = ignore,
) -> None:
    """Copy a file of a checkpoint to another place, read it back from there, and give it its name only if it is right.

    Until then it is named `<target>.<process>.partial`. A target that exists and is right is left as it is.

    Args:
        source: the file; target: the same at the other place, in a folder that exists.
        expected: its size and checksum, the manifest's {"bytes": ..., "xxh3_128": ...}.
        limit: bytes a second, for writing and for reading back; None: without a limit.
        progress: called with the bytes of each piece, once written and once read back; what it raises ends the upload.

    Raises:
        OSError: a file cannot be read or written. ValueError: the source or the copy differs from `expected`.
            The partial file is removed.
    """
    pace = Pace(limit)

    def passed(count: int) -> None:
        progress(count)
        pace(count)

    with contextlib.suppress(FileNotFoundError), target.open() as file:
        if file.seek(0, os.SEEK_END) == expected["bytes"]:
            if describe(target, passed, pace.piece, uncached=True) == expected:
                return
    partial = target.parent / f"{target.name}.{os.getpid()}{PARTIAL}"  # another process may upload the same
    try:
        if (stored := copy(source, partial, passed, pace.piece)) != expected:
            raise ValueError(_differs(source, stored, expected))
        if (stored := describe(partial, passed, pace.piece, uncached=True)) != expected:
            raise ValueError(_differs(target, stored, expected))
        partial.commit(target)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.remove()
        raise


def copy(
    source: Place, target: Place, progress: Callable[[int], None] = ignore, piece: int = PIECE
) -> dict[str, int | str]:
    """Copy a file to another place and return its size and checksum. The arguments are as of `describe`."""
    with source.open() as file:
        return target.write(iter(functools.partial(file.read, piece), b""), progress)


def describe(
    file: Place | Path, progress: Callable[[int], None] = ignore, piece: int = PIECE, uncached: bool = False
) -> dict[str, int | str]:
    """Return the bytes and the xxh3_128 checksum of a file.

    progress: called with the bytes of each piece. piece: bytes read at once. uncached: as of `Place.open`.
    """
    digest, size = xxhash.xxh3_128(), 0
    with at(file).open(uncached) as opened:
        while content := opened.read(piece):
            digest.update(content)
            size += len(content)
            progress(len(content))
    return {"bytes": size, "xxh3_128": digest.hexdigest()}


class Pace:
    """Waits so that bytes pass at no more than `limit` a second on average.

    Attributes:
        piece: bytes to transfer between two calls.
    """

    def __init__(self, limit: float | None):
        self.limit = limit
        self.piece = PIECE if limit is None else max(4096, min(PIECE, int(limit * QUICK)))
        self.passed, self.began = 0, time.monotonic()

    def __call__(self, count: int) -> None:
        """Wait until `count` more bytes may have passed."""
        self.passed += count
        if self.limit is not None:
            time.sleep(max(0.0, self.began + self.passed / self.limit - time.monotonic()))


def _differs(file: Place, stored: Mapping, expected: Mapping) -> str:
    return (
        f"{file} has {stored['bytes']} bytes with the checksum {stored['xxh3_128']}, its manifest states "
        f"{expected['bytes']} and {expected['xxh3_128']}"
    )
