# SPDX-License-Identifier: Apache-2.0
"""New lines of a file that a program appends to: its truncation, lines of megabytes and binary content included."""

from __future__ import annotations

import os
import stat
from pathlib import Path

LINE = 4096  # bytes of a line that are kept
AT_ONCE = 2 * 2**20  # bytes read in one call
BACKLOG = 64 * 2**20  # with more unread bytes, all but the last AT_ONCE are skipped


class Tail:
    """The lines that are appended to a file or come through a pipe. The file may appear later, or be replaced.

    from_end: leave out what a regular file holds now.
    skipped: bytes that were left out because the file grew faster than it was read.
    """

    def __init__(self, path: Path, from_end: bool = False):
        self.path, self.skipped = path, 0
        self._file: int | None = None
        self._identity: tuple[int, int] | None = None
        self._at = 0
        self._part, self._cut = b"", False  # the line without its end yet; whether the rest of it is left out
        if from_end:
            self._open()
            self._at = 0 if self._file is None else os.fstat(self._file).st_size

    def _open(self) -> None:
        try:
            found = os.stat(self.path)
            identity = found.st_dev, found.st_ino
            if identity == self._identity:
                return
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would wait here
        except OSError:  # it may come back: what is open is read on
            return
        self.close()
        self._file, self._identity, self._at = file, identity, 0

    def lines(self) -> list[bytes]:
        """Return the complete lines that are new, without their ends."""
        self._open()
        if self._file is None:
            return []
        state = os.fstat(self._file)
        regular = stat.S_ISREG(state.st_mode)
        if regular and state.st_size < self._at:  # truncated
            self._at, self._part, self._cut = 0, b"", False
        if regular and state.st_size - self._at > BACKLOG:
            self.skipped += state.st_size - AT_ONCE - self._at
            self._at, self._part, self._cut = state.st_size - AT_ONCE, b"", True
        try:
            new = os.pread(self._file, AT_ONCE, self._at) if regular else os.read(self._file, AT_ONCE)
        except BlockingIOError:
            return []
        self._at += len(new)
        *whole, part = new.replace(b"\r", b"\n").split(b"\n")  # progress bars end their lines with \r
        if not whole:
            self._keep(part)
            return []
        first = None if self._cut else (self._part + whole[0])[:LINE]
        self._part, self._cut = b"", False
        self._keep(part)
        return [line[:LINE] for line in ([] if first is None else [first]) + whole[1:] if line]

    def _keep(self, part: bytes) -> None:
        if not self._cut:
            self._part += part
            self._part = self._part[:LINE]  # so a line without an end takes no memory

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = self._identity = None
