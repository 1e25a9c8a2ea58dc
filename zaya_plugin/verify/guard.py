# SPDX-License-Identifier: Apache-2.0
"""Ends what a worker has started, also if `zaya verify` itself is killed by a signal that no program can handle:

    python -m zaya_plugin.verify.guard NAME=VALUE

It waits for the end of its stdin, whose other end only `zaya verify` holds, and then kills every process that was
started with NAME=VALUE in its environment. torchrun and its ranks have sessions of their own, and after the end of a
process between them and the worker their parents no longer say where they come from. The environment does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from zaya_plugin.ground.parent_death import on_end_signals

KILLED_S = 10  # a process that waits in the driver for a device that hangs does not end
SCAN_S = 0.05
SCANS = 2  # that find nothing, before it is believed: during execve a process shows no environment


def end_marked(mark: str) -> None:
    """Kill every process with `mark` in its environment, and return when none is left or after KILLED_S."""
    deadline = time.monotonic() + KILLED_S
    nothing = 0
    while nothing < SCANS and time.monotonic() < deadline:  # a process can start another one while the list is read
        pids = marked(mark)
        nothing = 0 if pids else nothing + 1
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(SCAN_S)


def marked(mark: str) -> list[int]:
    """Return the processes in whose first environment a variable starts with `mark`; none without /proc."""
    places = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # another user's process, or one that has ended
            if b"\0" + mark.encode() in b"\0" + path.read_bytes():
                places.append(int(path.parent.name))
    return places


def main(argv: list[str]) -> int:
    on_end_signals(signal.SIG_IGN)  # sent to a whole session or SLURM step
    sys.stdin.buffer.read()
    end_marked(argv[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
