# SPDX-License-Identifier: Apache-2.0
"""A place of checkpoints in memory: without paths, renames and locks, and with faults. It shows that checkpoints need no
more than `zaya_plugin.checkpoint.places.Place`.

A `Store` holds the files in the process of the test and serves them over a socket, since each rank's writer is a process
of its own.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import threading
from collections.abc import Callable, Iterable
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

import xxhash

from zaya_plugin.checkpoint.places import ignore
from zaya_plugin.config.run_directory import MANIFEST


class MemoryPlace:
    """A name in a store. Its address is <socket>!<name>."""

    path, renames = None, False

    def __init__(self, address: str):
        self.address = address
        self._socket, _, self._key = address.partition("!")
        self.name = self._key.rpartition("/")[2]

    def __repr__(self) -> str:
        return self.address

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MemoryPlace) and self.address == other.address

    def __hash__(self) -> int:
        return hash(self.address)

    @property
    def parent(self) -> MemoryPlace:
        return MemoryPlace(f"{self._socket}!{self._key.rpartition('/')[0]}")

    def __truediv__(self, name: str) -> MemoryPlace:
        return MemoryPlace(f"{self._socket}!{self._key}/{name}".replace("!/", "!"))

    def list(self, sizes: bool = True) -> dict[str, int | None]:
        return self._ask("list")

    def open(self, uncached: bool = False) -> io.BytesIO:
        return io.BytesIO(self._ask("read"))

    def make(self) -> None:
        self._ask("make")

    def write(
        self, parts: Iterable[bytes | memoryview], progress: Callable[[int], None] = ignore, *, direct: bool = False
    ) -> dict[str, int | str]:
        content = bytearray()
        for part in parts:
            content += part
            progress(len(part))
        self._ask("write", bytes(content))
        return {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}

    def put(self, content: bytes | str) -> None:
        self._ask("write", content.encode() if isinstance(content, str) else content)

    def commit(self, target: MemoryPlace) -> None:
        self._copy(target)
        self.remove()

    def _copy(self, target: MemoryPlace) -> None:
        try:
            names = self._manifest_last()
        except NotADirectoryError:
            return self._ask("copy", target._key)
        target.make()
        for name in names:
            (self / name)._copy(target / name)

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for name in reversed(self._manifest_last()):
                (self / name).remove()
        self._ask("remove")

    def _manifest_last(self) -> list[str]:
        return sorted(self.list(), key=lambda name: (name == MANIFEST, name))

    def lock(self, shared: bool = False) -> contextlib.ExitStack:
        return contextlib.ExitStack()

    def free(self) -> str:
        return "all memory is free"

    def _ask(self, operation: str, *arguments):
        connection = _connection(self._socket)
        connection.send((operation, self._key, *arguments))
        failed, answer = connection.recv()
        if failed:
            raise answer
        return answer


_connections = threading.local()


def _connection(socket: str) -> Connection:
    """Return this thread's connection to a store."""
    known = vars(_connections)
    if socket not in known:
        known[socket] = Client(socket, "AF_UNIX")
    return known[socket]


class Store:
    """The files of a MemoryPlace.

    Attributes:
        place: of its root.
        files, folders: by name. calls: the operations so far, with their names.
        fault: called with every operation and its name before it is carried out; what it raises is the answer.
    """

    def __init__(self, socket: Path):
        self.place = MemoryPlace(f"{socket}!")
        self.files: dict[str, bytes] = {}
        self.folders = {""}
        self.calls: list[tuple[str, str]] = []
        self.fault: Callable[[str, str], None] = lambda operation, name: None
        self._alone = threading.Lock()
        self._listener = Listener(str(socket), "AF_UNIX", backlog=16)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listener.accept(),), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                operation, name, *arguments = connection.recv()
                try:
                    self.fault(operation, name)
                    with self._alone:
                        self.calls.append((operation, name))
                        answer = False, getattr(self, f"_{operation}")(name, *arguments)
                except OSError as error:
                    answer = True, error
                connection.send(answer)

    def _list(self, name: str) -> dict[str, int | None]:
        if name not in self.folders:
            raise NotADirectoryError(errno.ENOTDIR, "Not a directory", name) if name in self.files else missing(name)
        start = f"{name}/" if name else ""
        sizes = {key: len(content) for key, content in self.files.items()} | dict.fromkeys(self.folders - {""})
        within = {key.removeprefix(start): size for key, size in sizes.items() if key.startswith(start)}
        return {key: size for key, size in within.items() if "/" not in key}

    def _read(self, name: str) -> bytes:
        if name in self.folders:
            raise IsADirectoryError(errno.EISDIR, "Is a directory", name)
        if name not in self.files:
            raise missing(name)
        return self.files[name]

    def _write(self, name: str, content: bytes) -> None:
        if name.rpartition("/")[0] not in self.folders:
            raise missing(name)
        if name in self.folders:
            raise IsADirectoryError(errno.EISDIR, "Is a directory", name)
        self.files[name] = content

    def _copy(self, name: str, target: str) -> None:
        self._write(target, self._read(name))

    def _make(self, name: str) -> None:
        parts = name.split("/")
        for end in range(1, len(parts) + 1):
            if (folder := "/".join(parts[:end])) in self.files:
                raise FileExistsError(errno.EEXIST, "File exists", folder)
            self.folders.add(folder)

    def _remove(self, name: str) -> None:
        self.files.pop(name, None)
        self.folders.discard(name)


def missing(name: str) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
