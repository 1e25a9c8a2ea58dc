# SPDX-License-Identifier: Apache-2.0
"""A process that accesses a file system, and is left alone if it hangs: an access to a mount whose server is gone
cannot be interrupted, not even by SIGKILL, and would hold the process that waits for it, even at its end.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path

# One access for each line of its input, and one line of JSON for each. It ends with its parent, whose end closes its
# input.
PROGRAM = """
import json, os, sys
folder, access, name = sys.argv[1:]

def write():
    path = os.path.join(folder, name)
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        os.write(file, b"zaya" * 1024)
        os.fsync(file)
    finally:
        os.close(file)
        os.unlink(path)
    space = os.statvfs(folder)
    return {"free": space.f_bavail * space.f_frsize, "total": space.f_blocks * space.f_frsize,
            "inodes": space.f_favail, "all_inodes": space.f_files}

def read():
    for entry in os.scandir(folder):
        try:
            open(os.path.join(entry.path, name), "rb").read()
        except OSError:  # whoever needs the file names it and continues with the next
            pass
    return {}

for line in sys.stdin:
    try:
        answer = {"write": write, "read": read}[access]()
    except OSError as error:
        answer = {"errno": error.errno, "text": error.strerror}
    print(json.dumps(answer), flush=True)
"""


class StorageProbe:
    """Accesses `folder` in a process of its own.

    access: "write": write, sync and remove a small file `name`; the answer has free bytes and inodes. "read": read the
    files `name` in the folders below. The answer to an access that fails has errno and text.
    """

    def __init__(self, folder: str | os.PathLike, access: str, name: str):
        words = [sys.executable, "-I", "-S", "-c", PROGRAM, str(Path(folder)), access, name]
        pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.process = subprocess.Popen(words, start_new_session=True, bufsize=0, **pipes)

    def ask(self) -> bool:
        """Start an access; return False if the process was killed."""
        try:
            return bool(os.write(self.process.stdin.fileno(), b"\n"))
        except OSError:
            return False

    def answer(self, seconds: float) -> dict | None:
        """Return the answer, or None after `seconds` or if the process has ended."""
        if not select.select([self.process.stdout], [], [], seconds)[0]:
            return None
        try:
            return json.loads(os.read(self.process.stdout.fileno(), 4096))
        except ValueError:
            return None

    def close(self) -> None:
        """End the process, without waiting for it."""
        self.process.kill()
        self.process.poll()
        self.process.stdin.close()
        self.process.stdout.close()
