# SPDX-License-Identifier: Apache-2.0
"""End a process with the process that started it, also if that one is killed. On Linux; on other systems these
functions do nothing.

Megatron collects what its checkpoint writers wrote through a `multiprocessing` manager, a process of half a gigabyte a
rank. It waits for requests for ever, also after the rank was killed (out of memory, a failed node agent, `kill -9`).
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
RANK_PID = "ZAYA_RANK_PID"


def die_with_parent(number: int = signal.SIGTERM) -> None:
    """Let the kernel send this process signal `number` when its parent ends (strictly: the thread that started it;
    prctl(2)).
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


def adopt_children() -> None:
    """In a rank: give the processes that it spawns from now on its process id, for `follow_rank`."""
    os.environ[RANK_PID] = str(os.getpid())


def follow_rank() -> None:
    """In a process that a rank has spawned: end with the rank, also if it was killed before this call."""
    if sys.platform == "linux" and RANK_PID in os.environ:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != int(os.environ[RANK_PID]):
            os._exit(1)
