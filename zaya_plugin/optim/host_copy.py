# SPDX-License-Identifier: Apache-2.0
"""Asynchronous copies from the device to the host, during which the host continues to launch work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """Copies of `tensors` in host memory, complete once the device has done the work launched before.

    Only `read` waits. Later work of the same stream may overwrite the sources. On the CPU the copies are complete at
    once.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        # From a device, torch copies to pinned memory.
        self._copies = [t.detach().to("cpu", non_blocking=True, copy=True) for t in tensors]
        self._event = None
        if any(t.is_cuda for t in tensors):
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_complete(self) -> bool:
        """Whether `read` would return at once. False during the capture of a CUDA graph, when events must not be
        queried.
        """
        if self._event is None:
            return True
        return not torch.cuda.is_current_stream_capturing() and self._event.query()

    def read(self) -> list[Tensor]:
        """Return the tensors on the host. It waits for this copy, not for work launched after it."""
        if not self.is_complete:
            self._event.synchronize()
        return self._copies
