# SPDX-License-Identifier: Apache-2.0
"""Memory of each rank of one host that all its ranks can write: on accelerators torch's symmetric memory, on a CPU a shared file.

A window has a slot for every writer. Between two barriers ranks write their slots of each other's windows; behind the second each may read its own window.
"""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup


class Window(Protocol):
    """rank, size: of this process in the group; slot_bytes: of each slot, a multiple of 32, so that halves are of 16."""

    rank: int
    size: int
    slot_bytes: int

    def slots(self, owner: int, dtype: torch.dtype) -> Tensor:
        """The window of rank `owner` as [size, elements of a slot]; row w is what rank w writes."""

    def barrier(self) -> None:
        """Behind it, on the current stream, what any rank wrote before its own is there."""


def open_window(group: ProcessGroup, slot_bytes: int, device: torch.device, timeout_ms: int) -> Window:
    """A window of `slot_bytes` a slot. All ranks of the group call this together. timeout_ms: of a barrier on a device; on a CPU the group has its own.

    Raises:
        ValueError: the ranks are on several hosts, or their devices cannot map each other's memory.
    """
    hosts: list[str] = [""] * group.size()
    torch.distributed.all_gather_object(hosts, socket.gethostname(), group=group)
    if len(set(hosts)) > 1:
        raise ValueError(
            f"parallel.reduce_by_copies = True: allowed where ranks that share gradients are on one host; they are on {', '.join(sorted(set(hosts)))}"
        )
    return (
        HostWindow(group, slot_bytes)
        if device.type == "cpu"
        else SymmetricWindow(group, slot_bytes, device, timeout_ms)
    )


class SymmetricWindow:
    """torch.distributed._symmetric_memory: peers' memory in the address space of each process; NVIDIA and ROCm."""

    def __init__(self, group: ProcessGroup, slot_bytes: int, device: torch.device, timeout_ms: int):
        from torch.distributed import _symmetric_memory

        assert timeout_ms > 0, "0 would be for ever"
        self.rank, self.size, self.slot_bytes, self.timeout_ms = group.rank(), group.size(), slot_bytes, timeout_ms
        # Else torch makes a multicast object of every window, which nobody reads here, and which some machines refuse.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        try:
            self.memory = _symmetric_memory.empty(self.size * slot_bytes, dtype=torch.uint8, device=device)
            self.handle = _symmetric_memory.rendezvous(self.memory, group)
        except RuntimeError as refused:
            raise ValueError(
                f"parallel.reduce_by_copies = True: the {self.size} devices cannot map {self.size * slot_bytes:,} bytes of each other's memory ({refused}); "
                "allowed here: False"
            ) from refused

    def slots(self, owner: int, dtype: torch.dtype) -> Tensor:
        return self.handle.get_buffer(owner, (self.size, self.slot_bytes // dtype.itemsize), dtype)

    def barrier(self) -> None:
        # A kernel that waits for the other ranks' kernels, of which no watchdog knows. After its time it traps, and the device's next call is an error; a graph
        # keeps the time that it was captured with. On ROCm torch counts it in an MI300's clocks.
        self.handle.barrier(timeout_ms=self.timeout_ms)


class HostWindow:
    """Files in shared memory, one a rank, that are gone from their folder as soon as all have them."""

    def __init__(self, group: ProcessGroup, slot_bytes: int):
        self.group, self.rank, self.size, self.slot_bytes = group, group.rank(), group.size(), slot_bytes
        folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else Path(tempfile.gettempdir())
        descriptor, path = tempfile.mkstemp(prefix=f"zaya_window_{os.getpid()}_", dir=folder)
        try:
            os.posix_fallocate(
                descriptor, 0, self.size * slot_bytes
            )  # a full disk is an error here, not a signal later
            paths: list[str] = [""] * self.size
            torch.distributed.all_gather_object(paths, path, group=group)
            self.windows = [_mapped(each) for each in paths]
            self.barrier()
        except OSError as full:
            raise ValueError(
                f"parallel.reduce_by_copies = True: {folder} cannot give {self.size * slot_bytes:,} bytes to share ({full}); allowed here: False"
            ) from full
        finally:
            os.close(descriptor)
            os.unlink(path)

    def slots(self, owner: int, dtype: torch.dtype) -> Tensor:
        return self.windows[owner].view(dtype).view(self.size, -1)

    def barrier(self) -> None:
        torch.distributed.barrier(group=self.group)


def _mapped(path: str) -> Tensor:
    """The file's bytes, shared with whoever else maps it."""
    with open(path, "r+b") as file:
        return torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
