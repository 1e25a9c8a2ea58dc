# SPDX-License-Identifier: Apache-2.0
"""The end of a process at a chosen operation on files, for tests in one process."""

import os
from pathlib import Path


class Killed(BaseException):
    """The process ends at this point."""


def kill_at(monkeypatch, number: int) -> list[str]:
    """Let the `number`-th operation on files end the process instead; returns the operations."""
    done: list[str] = []

    def counted(holder, name):
        original = getattr(holder, name)

        def operation(*positional, **named):
            if len(done) == number:
                raise Killed
            done.append(name)
            return original(*positional, **named)

        monkeypatch.setattr(holder, name, operation)

    for name in ("mkdir", "write_text", "unlink", "rename"):
        counted(Path, name)
    counted(os, "replace")
    counted(os, "fsync")
    counted(os, "rmdir")  # of rmtree
    return done
