# SPDX-License-Identifier: Apache-2.0
"""One command at a time writes an output: a lock in the file <output>.lock, which ends with its process."""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from zaya_plugin.ground.errors import mistake


@contextmanager
def locked(output: str | os.PathLike, doing: str) -> Iterator[None]:
    """Hold the lock of `output`. The kernel drops it when the process dies; the file that is left then holds nobody up.

    doing: what the command does with the output, for the message of the other one.

    Raises:
        ValueError: another process holds it.
    """
    output = os.path.abspath(output)
    path = output + ".lock"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    while True:
        # Mode "a" keeps the holder's text, mode "w" would truncate it before this process has the lock.
        with open(path, "a+", encoding="utf-8") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.seek(0)
                raise mistake(
                    "--output",
                    output,
                    problem=f"another process is {doing} {output} ({lock.read().strip() or 'just starting'})",
                    fix="wait for it to end, or choose another --output",
                ) from None
            # The previous holder may have removed the file between open and lock; then other processes lock a new file.
            try:
                if not os.path.samestat(os.stat(path), os.fstat(lock.fileno())):
                    continue
            except FileNotFoundError:
                continue
            lock.truncate(0)
            print(f"process {os.getpid()} on {socket.gethostname()}", file=lock, flush=True)
            try:
                yield
            finally:
                os.unlink(path)
            return
