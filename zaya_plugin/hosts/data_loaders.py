# SPDX-License-Identifier: Apache-2.0
"""The processes that read a rank's data (data.num_workers): forks of the rank, made by torch's DataLoader."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading

from zaya_plugin.parent_death import follow_rank

DEVICES = ("/dev/kfd", "/dev/dri/")  # of AMD; Megatron closes NVIDIA's itself (its worker_init_fn)
END_SECONDS = 5.0


def tie_to_rank() -> None:
    """Let every fork that this process' main thread makes from now on end with it, and hold none of AMD's devices.

    torch's loaders look for their parent every 5 s, between two reads. Until then they would keep the connections of a
    rank that was killed open, so that the others wait for it, and the memory of its device taken, so that the next
    start finds no room (github.com/NVIDIA/Megatron-LM/pull/3684, for NVIDIA).
    """
    os.register_at_fork(before=_note_thread, after_in_child=_in_fork)


_forks_in_main_thread = False


def _note_thread() -> None:
    global _forks_in_main_thread
    _forks_in_main_thread = threading.current_thread() is threading.main_thread()


def _in_fork() -> None:
    if _forks_in_main_thread:  # else the kernel would end the fork with the thread
        follow_rank()
    if os.path.exists("/proc/self/fd"):
        _close_devices()


def _close_devices() -> None:
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{descriptor}").startswith(DEVICES):
                os.close(int(descriptor))


def end() -> None:
    """End the loaders.

    Python would end them at its exit by SIGTERM and wait for them. In them Megatron replaces the handler of that signal
    (its worker_init_fn), so the exit would wait for ever for a loader that something still refers to. As forks they
    also keep the connection of the writer of checkpoints open.
    """
    if loaders := [child for child in multiprocessing.active_children() if child.daemon]:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises an error for a loader that was killed
        for loader in loaders:
            loader.kill()
            loader.join(END_SECONDS)  # not for ever: one that waits for storage cannot be ended
