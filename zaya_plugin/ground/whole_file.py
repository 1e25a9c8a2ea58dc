# SPDX-License-Identifier: Apache-2.0
"""Write a file that appears whole or not at all."""

import os


def write_whole(path: str | os.PathLike, content) -> None:
    """Write and sync `content`, bytes or text, to a file of this process and rename it to `path`."""
    temporary = f"{os.fspath(path)}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as out:
            out.write(content.encode() if isinstance(content, str) else content)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except OSError:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise
