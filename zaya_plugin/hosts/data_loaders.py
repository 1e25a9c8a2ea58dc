# SPDX-License-Identifier: Apache-2.0
"""The processes that read a rank's data (data.num_workers): forks of the rank, made by torch's DataLoader."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal

DEVICES = ("/dev/kfd", "/dev/dri/")  # of AMD; Megatron closes NVIDIA's itself (its worker_init_fn)
END_SECONDS = 5.0


def close_devices_in_forks() -> None:
    """Close AMD's devices in every fork of this process from now on.

    The memory of a device stays taken until the last process that holds it open has ended. A loader that waits for
    storage outlives a rank that was killed, and the next start would find no room
    (github.com/NVIDIA/Megatron-LM/pull/3684, for NVIDIA).
    """
    if any(os.path.exists(each) for each in DEVICES):
        os.register_at_fork(after_in_child=_close_devices)


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
