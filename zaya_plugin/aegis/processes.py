# SPDX-License-Identifier: Apache-2.0
"""The processes of a node's ranks, known by a variable of their environment, also after their agent was killed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from zaya_plugin.ground.parent_death import on_end_signals

FOLDER = "ZAYA_AEGIS_DIR"  # the agent's folder on this node, in the environment of every rank and of what it starts
POLL = 0.02


def below(folder: Path) -> list[int]:
    """Return the living processes that were started with `folder` in their environment, of this user."""
    return started_with(f"{FOLDER}={folder}")


def started_with(variable: str) -> list[int]:
    """Return the living processes that were started with `variable` (NAME=value), of this user."""
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
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to each process that still exists."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except (ProcessLookupError, PermissionError):
            pass


def kill_all(folder: Path, seconds: float, while_waiting: Callable[[], None] = lambda: None) -> list[int]:
    """Send SIGKILL to the processes of `folder` and those that they start in the meantime, until none is left; return those
    that are left after `seconds`: in state D, or frozen. while_waiting: called again and again.
    """
    deadline = time.monotonic() + seconds
    while left := below(folder):
        send(left, signal.SIGKILL)
        reap()
        if time.monotonic() > deadline:
            return left
        while_waiting()
        time.sleep(POLL)
    reap()
    return []


def reap() -> None:
    """Remove adopted orphans that have ended; the exit codes of children that `subprocess` started stay with it."""
    for pid in _zombies(os.getpid()):
        if pid not in KNOWN:
            try:
                os.waitpid(pid, os.WNOHANG)
            except ChildProcessError:
                pass


KNOWN: set[int] = set()  # children whose exit code is read elsewhere


def _zombies(parent: int) -> list[int]:
    try:
        children = Path(f"/proc/self/task/{parent}/children").read_text().split()
    except OSError:
        return []
    return [int(pid) for pid in children if state(int(pid)) == "Z"]


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
