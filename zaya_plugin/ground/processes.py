# SPDX-License-Identifier: Apache-2.0
"""Processes that are known by a variable of their environment, also after their parents have ended: find, signal and
kill them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from zaya_plugin.ground.parent_death import on_end_signals, stat

# The agent's folder on this node, in the environment of every rank of `zaya aegis run` and of what a rank starts.
AEGIS_FOLDER = "ZAYA_AEGIS_DIR"
POLL = 0.05
GUARD_SECONDS = 10  # for the end of what a guard kills: a process that waits in a device's driver may not end
EMPTY_SCANS = 2  # before no process counts as left: during execve a process shows no environment


def ranks_mark(folder: Path) -> str:
    """Return the variable of the ranks that an agent with `folder` has started."""
    return f"{AEGIS_FOLDER}={folder}"


def started_with(variable: str) -> list[int]:
    """Return the living processes that were started with `variable` (NAME=value), of this user; none without /proc."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (path / "environ").read_bytes().split(b"\0"):
                pids.append(int(path.name))
        except OSError:  # it has ended, or is another user's
            continue
    return [pid for pid in pids if state(pid) not in ("", "Z", "X")]


def state(pid: int) -> str:
    """Return the letter of a process's state, such as S or D; empty: there is no such process."""
    return (stat(pid) or [""])[0]


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill_all(variable: str, seconds: float, between: Callable[[], None] = lambda: None) -> list[int]:
    """Send SIGKILL to the processes with `variable` and to those that they start, until none is left; return those
    that are left after `seconds`: in state D, or frozen. between: called after each scan.
    """
    deadline = time.monotonic() + seconds
    empty = 0
    while empty < EMPTY_SCANS:
        left = started_with(variable)
        empty = 0 if left else empty + 1
        send(left, signal.SIGKILL)
        reap()
        if left and time.monotonic() > deadline:
            return left
        between()
        time.sleep(POLL)
    return []


def start_guard(variable: str) -> subprocess.Popen:
    """Start a process that kills those with `variable` when its stdin is closed, which the end of this process does
    too, by any signal. It is for launchers and ranks in sessions of their own, whose parents may have ended.
    """
    words = [sys.executable, "-m", "zaya_plugin.ground.processes", variable]
    null = subprocess.DEVNULL
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=null, stderr=null, start_new_session=True)


def reap() -> None:
    """Reap adopted orphans that have ended; children in OWN_CHILDREN keep their exit codes for `subprocess`."""
    for pid in _zombies(os.getpid()):
        if pid not in OWN_CHILDREN:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


OWN_CHILDREN: set[int] = set()


def wake_on_signals(on_signal: Callable[[int], None]) -> int:
    """Call `on_signal` at each signal that ends a run, and return a file that can be read after any signal, such as the
    end of a child.
    """
    wake, sleep = os.pipe()
    os.set_blocking(wake, False)
    os.set_blocking(sleep, False)
    signal.set_wakeup_fd(sleep, warn_on_full_buffer=False)
    on_end_signals(lambda number, frame: on_signal(number))
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return wake


def _zombies(parent: int) -> list[int]:
    try:
        children = Path(f"/proc/self/task/{parent}/children").read_text().split()
    except OSError:
        return []
    return [int(pid) for pid in children if state(int(pid)) == "Z"]


if __name__ == "__main__":  # a guard
    on_end_signals(signal.SIG_IGN)  # sent to a whole session or SLURM step
    sys.stdin.buffer.read()
    kill_all(sys.argv[1], GUARD_SECONDS)
