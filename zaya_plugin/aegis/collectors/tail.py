# SPDX-License-Identifier: Apache-2.0
"""New content of a file that a program appends to: its truncation, lines of megabytes and binary content included."""

from __future__ import annotations

import os
import re
import stat
import time
from pathlib import Path

LINE = 4096  # bytes of a line that are kept
AT_ONCE = 2 * 2**20  # bytes read in one call
BACKLOG = 64 * 2**20  # with more unread bytes, all but the last AT_ONCE are skipped
MARK = 256  # bytes before the unread ones; a file in which they have changed was truncated and written again
# What glog (torch, gloo) and Python's logging write: E1122 10:00:00.123000, 2026-11-22 10:00:00,123. Torch's C++ side
# writes month * 100 + day, so August has one digit: E813.
GLOG = re.compile(r"\b[EWIF](?P<month>\d{1,2})(?P<day>\d\d) (?P<clock>\d\d:\d\d:\d\d)\.(?P<part>\d+)")
LOGGING = re.compile(r"(?P<year>\d{4})-(?P<month>\d\d)-(?P<day>\d\d)[ T](?P<clock>\d\d:\d\d:\d\d)[,.](?P<part>\d+)")
OLD = 300.0  # seconds; a line with an older stamp quotes another one


class Tail:
    """The content that is appended to a file or comes through a pipe. The file may appear later, be truncated or be
    replaced: what was not read yet of the file before comes first.

    output: an open file to read, of a process that writes to it under any name that it may get; in place of a path.
    position: of the next byte to read.
    """

    def __init__(self, path: Path, output: int | None = None):
        self.path = path
        self._file, self._follows_name = output, output is None
        self._identity: tuple[int, int] | None = None
        self.position, self._mark = 0, b""
        self._part, self._cut = b"", False  # the line without its end yet; whether the rest of it is left out

    @property
    def closed(self) -> bool:
        """Whether this is the output of a process, and was closed."""
        return self._file is None and not self._follows_name

    def _open(self) -> bool:
        """Open the file that has the name now; return whether it is another one than before, with content."""
        try:
            status = os.stat(self.path)
            identity = status.st_dev, status.st_ino
            empty = stat.S_ISREG(status.st_mode) and not status.st_size  # its writer may still write to the one before
            if identity == self._identity or empty:
                return False
            file = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe without a writer would wait
        except OSError:  # it may come back: what is open is read on
            return False
        self.close()
        self._file, self._identity, self.position, self._mark = file, identity, 0, b""
        return True

    def read(self) -> bytes:
        """Return the new bytes, at most about AT_ONCE. After a truncation, and where another file has the name, the
        first one ends the line before.
        """
        new = b"" if self._file is None else self._read()
        if new or not self._follows_name:
            return new
        end = b"" if self._file is None else b"\n"
        return end + self._read() if self._open() else b""

    def _read(self) -> bytes:
        state = os.fstat(self._file)
        if not stat.S_ISREG(state.st_mode):
            try:
                return os.read(self._file, AT_ONCE)
            except BlockingIOError:
                return b""
        known, end = len(self._mark), b""
        if os.pread(self._file, known, self.position - known) != self._mark:
            self.position, self._mark, end = 0, b"", b"\n"
        if state.st_size - self.position > BACKLOG:
            self.position, self._mark, self._part, self._cut = state.st_size - AT_ONCE, b"", b"", True
        new = os.pread(self._file, AT_ONCE, self.position)
        self.position += len(new)
        self._mark = (self._mark + new)[-MARK:]
        return end + new

    def lines(self) -> list[bytes]:
        """Return the complete lines that are new, without their ends."""
        *whole, part = self.read().replace(b"\r", b"\n").split(b"\n")  # progress bars end their lines with \r
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


def stamp(line: str, now: float) -> float:
    """Return the time that a line says it was written at, in the node's time zone; without one, `now`."""
    match = GLOG.search(line, 0, 100) or LOGGING.search(line, 0, 100)
    if match is None:
        return now
    year = match.groupdict().get("year") or time.localtime(now).tm_year
    try:
        written = time.strptime(f"{year}-{match['month']}-{match['day']} {match['clock']}", "%Y-%m-%d %H:%M:%S")
    except ValueError:
        return now
    at = time.mktime(written) + float(f"0.{match['part']}")
    return at if now - OLD < at <= now + 1 else now
