# SPDX-License-Identifier: Apache-2.0
"""The folder of the built libraries, and a lock that lets one process build at a time."""

import contextlib
import errno
import fcntl
import os
import sys
from collections.abc import Iterator
from pathlib import Path


def cache_folder() -> Path:
    """Return HIP_OPS_CACHE, otherwise hip_ops in XDG_CACHE_HOME, otherwise ~/.cache/hip_ops."""
    requested = os.environ.get("HIP_OPS_CACHE")
    if requested:
        return Path(requested).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "hip_ops"


@contextlib.contextmanager
def locked(file: Path) -> Iterator[bool]:
    """Hold an exclusive lock on `file` between processes; the lock ends with its process.

    Yields False where the file system has no locks (some network mounts). Then two processes may build at once, and the
    atomic renames keep both results intact.
    """
    with open(file, "a") as handle:
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"hip_ops: waiting for another process that builds ({file})", file=sys.stderr, flush=True)
                fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise
            yield False
            return
        yield True  # closing the file unlocks it
