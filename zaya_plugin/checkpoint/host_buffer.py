# SPDX-License-Identifier: Apache-2.0
"""Host memory that a rank fills and its writer process reads, and the copy of the rank's tensors into it.

On a GPU the copy runs on streams of its own during the next step's forward and backward pass. It starts after an event
that the caller's stream records, so it reads what the optimizer has written; and the next update waits, by events on
the device, only for tensors that are not copied yet.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

SMALL = 2**20  # bytes; smaller tensors are copied together
GROUP = 2**28  # bytes of larger tensors for which there is one event
# Copies of one stream. It takes 1,024; at the next one the host waits until one is done, and the device runs out of
# work (docs/log.md). One of two ranks has 1,750 tensors of ZAYA1-base. A group has at most GROUP / SMALL.
A_STREAM = 700


class HostBuffer:
    """Memory without a name, shared by its descriptor with a child process.

    Attributes:
        descriptor: of the memory.
        pinned: whether the device copies into it without the host's help.
    """

    def __init__(self):
        self.descriptor = os.memfd_create("zaya-checkpoint", os.MFD_CLOEXEC)
        self.memory: mmap.mmap | None = None
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self.pinned = False

    def allocate(self, size: int, pin: bool) -> None:
        """Reserve `size` bytes; pin: for copies from a GPU.

        Raises:
            OSError: the memory is not available.
        """
        self.release()
        os.ftruncate(self.descriptor, size)
        os.posix_fallocate(self.descriptor, 0, size)
        self.memory = mmap.mmap(self.descriptor, size)
        self.bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        if pin:
            self.pinned = int(torch.cuda.cudart().cudaHostRegister(self.bytes.data_ptr(), size, 0)) == 0
            if not self.pinned:
                with contextlib.suppress(RuntimeError):  # the error stays until the next launch asks for it
                    torch.zeros(1, device="cuda")

    def write(self, start: int, data: bytes) -> None:
        """Set bytes."""
        self.memory[start : start + len(data)] = data

    def release(self) -> None:
        """Give the memory back; copies into it must have ended."""
        if self.pinned:
            torch.cuda.cudart().cudaHostUnregister(self.bytes.data_ptr())
            self.pinned = False
        self.bytes, self.memory = torch.empty(0, dtype=torch.uint8), None
        os.ftruncate(self.descriptor, 0)


def view(memory: Tensor, start: int, like: Tensor) -> Tensor:
    """Return the bytes of `memory` from `start` on as a tensor with the shape and dtype of `like`."""
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


class Staging:
    """Copies tensors into a buffer, once for each save.

    Args:
        tensors: (start in the buffer, tensor), in the order of the buffer; they are on one device and stay where they
            are.
    """

    def __init__(self, buffer: HostBuffer, tensors: Sequence[tuple[int, Tensor]]):
        self.on_device = any(tensor.is_cuda for _, tensor in tensors)
        self._pairs = [(view(buffer.bytes, start, tensor), tensor) for start, tensor in tensors]
        self._events: list[torch.cuda.Event] = []
        self._in_flight = False
        if not self.on_device:
            return
        small = [(start, tensor) for start, tensor in tensors if tensor.nbytes < SMALL]
        large = [pair for pair in self._pairs if pair[1].nbytes >= SMALL]
        self._small: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        if small:
            first, end = small[0][0], small[-1][0] + small[-1][1].nbytes
            # They change early in the next step, so they are put together on the device at once.
            together = torch.empty(end - first, dtype=torch.uint8, device=small[0][1].device)
            for start, tensor in small:  # one kernel for each dtype
                places, tensors = self._small.setdefault(tensor.dtype, ([], []))
                places.append(view(together, start - first, tensor))
                tensors.append(tensor)
            large.insert(0, (buffer.bytes[first:end], together))
        self._groups: list[list[tuple[Tensor, Tensor]]] = []
        self._streams: list[torch.cuda.Stream] = []  # of each group
        size, copies = GROUP, A_STREAM
        for pair in large:
            if size >= GROUP:
                if copies >= A_STREAM:
                    stream, copies = torch.cuda.Stream(), 0
                self._groups.append([])
                self._streams.append(stream)
                size = 0
            self._groups[-1].append(pair)
            size += pair[1].nbytes
            copies += 1
        self._events = [torch.cuda.Event() for _ in self._groups]
        # The group whose copy an update of a tensor has to wait for.
        addresses = [(tensor.data_ptr(), n) for n, group in enumerate(self._groups) for _, tensor in group]
        self._addresses, self._group_of = map(list, zip(*sorted(addresses), strict=True)) if addresses else ([], [])

    @torch.no_grad()
    def start(self) -> None:
        """Copy the values that the tensors hold at this point of the current stream;
        on the CPU all of it before this returns.
        """
        if not self.on_device:
            for place, tensor in self._pairs:
                place.copy_(tensor)
            return
        for places, tensors in self._small.values():
            torch._foreach_copy_(places, tensors)
        before, last = torch.cuda.current_stream().record_event(), None
        for group, event, stream in zip(self._groups, self._events, self._streams, strict=True):
            if stream is not last:  # one stream after the other
                stream.wait_event(before)
            with torch.cuda.stream(stream):
                for place, tensor in group:
                    place.copy_(tensor, non_blocking=True)
                event.record()
            before, last = event, stream
        self._in_flight = True

    @property
    def is_complete(self) -> bool:
        """Whether everything is in the buffer. Does not wait. False during the capture of a CUDA graph, when events
        must not be queried.
        """
        if self._in_flight and not torch.cuda.is_current_stream_capturing():
            self._in_flight = not self._events[-1].query()
        return not self._in_flight

    def wait(self) -> None:
        """Wait on the host until everything is in the buffer."""
        if self._in_flight:
            self._events[-1].synchronize()
            self._in_flight = False

    def before_change(self, tensors: Iterable[Tensor]) -> None:
        """Let the current stream wait until `tensors` are copied, for a kernel that will change them."""
        if not self._in_flight:
            return
        groups = set()
        for tensor in tensors:
            first = bisect.bisect_left(self._addresses, tensor.data_ptr())
            end = bisect.bisect_left(self._addresses, tensor.data_ptr() + tensor.nbytes)
            groups.update(self._group_of[first:end])
        for group in groups:
            torch.cuda.current_stream().wait_event(self._events[group])
