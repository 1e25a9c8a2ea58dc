# SPDX-License-Identifier: Apache-2.0
"""The processes that read a rank's data (data.num_workers): forks of the rank, made by torch's DataLoader."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from multiprocessing.connection import Listener

from torch.utils.data import _utils

from zaya_plugin.ground.errors import mistake
from zaya_plugin.ground.parent_death import PR_SET_PDEATHSIG

DEVICE_FILES = ("/dev/kfd", "/dev/dri/")  # of AMD; Megatron closes NVIDIA's itself (its worker_init_fn)
END_SECONDS = 5.0


def prepare(number: int) -> None:
    """Prepare this rank for `number` loaders, before they are made.

    Raises:
        ValueError: they could not hand over what they read. They make a socket in the folder for temporary files, whose
            name the kernel limits to 107 bytes, and the rank would wait for the first batch for ever.
    """
    if number:
        _check_folder()
        _tie_to_rank()


def _check_folder() -> None:
    try:
        Listener(family="AF_UNIX").close()
    except OSError as error:
        raise mistake(
            "TMPDIR",
            tempfile.gettempdir(),
            problem=f"data loaders (data.num_workers) cannot make a socket there ({error})",
            allowed="a short path, of at most 60 bytes, on a local disk",
            fix="TMPDIR=/tmp, or data.num_workers=0",
        ) from None


def _tie_to_rank() -> None:
    """From now on every fork of this process holds none of AMD's devices, and one that its main thread makes ends with
    it.

    torch's loaders look for their parent every 5 s, between two reads. Until then they would keep the connections of a
    rank that was killed open, so that the others wait for it, and the memory of its device taken, so that the next
    start finds no room (github.com/NVIDIA/Megatron-LM/pull/3684, for NVIDIA).
    """
    if sys.platform != "linux":
        return
    rank, main = os.getpid(), threading.main_thread().ident
    prctl = ctypes.CDLL(None).prctl  # opened before the fork: a fork of a process with threads should load nothing

    def in_fork() -> None:
        # The kernel sends the signal when the thread that forked ends, so forks of other threads are left alone; so are
        # forks of a fork.
        if threading.get_ident() == main and os.getppid() == rank:
            prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        for descriptor in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{descriptor}").startswith(DEVICE_FILES):
                    os.close(int(descriptor))

    os.register_at_fork(after_in_child=in_fork)


def end() -> None:
    """End the loaders. The process must read no data after it.

    Python would end them at its exit by SIGTERM and wait for them. Megatron's worker_init_fn replaces the handler of
    that signal in them, so that a SIGTERM to the whole job leaves them for the last steps; the exit would wait for ever
    for a loader that something still refers to. As forks they also keep the connection of the writer of checkpoints
    open. One that waits for storage cannot be ended; the exit still waits for it.
    """
    if loaders := [child for child in multiprocessing.active_children() if child.daemon]:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error for a loader that was killed
        _utils.python_exit_status = True  # torch's destructors would use locks that a killed loader may hold
        for loader in loaders:
            loader.kill()
        deadline = time.monotonic() + END_SECONDS
        for loader in loaders:
            loader.join(max(0.0, deadline - time.monotonic()))
