# SPDX-License-Identifier: Apache-2.0
"""Processes that end with the one that started them, also where that one is killed outright. Linux; elsewhere nothing happens.

Megatron collects what its checkpoint writers wrote through a `multiprocessing` manager, a process of half a gigabyte a rank. It
waits for requests for ever: if the rank is killed (out of memory, a failed node agent, `kill -9`) nobody tells it to stop.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
RANK_PID = "ZAYA_RANK_PID"


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """The kernel sends this process signal `number` once its parent is gone (strictly: the thread that started it; prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def adopt_children() -> None:
    """For a rank: what it spawns from now on knows its number, see `follow_rank`."""
    os.environ[RANK_PID] = str(os.getpid())


def follow_rank() -> None:
    """For a process that a rank has spawned: ends with it, also if the rank was killed before this was called."""
    if sys.platform == "linux" and RANK_PID in os.environ:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != int(os.environ[RANK_PID]):
            os._exit(1)
