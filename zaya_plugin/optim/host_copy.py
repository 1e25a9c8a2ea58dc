# SPDX-License-Identifier: Apache-2.0
"""Numbers on their way from the device to the host, while the host goes on launching work."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """Copies of `tensors` in host memory, complete once the device gets to where it was asked for them.

    Nothing waits until `read`. The sources may be overwritten by later work of the same stream. On the CPU everything is there at once.
    """

    def __init__(self, tensors: Sequence[Tensor]):
        # to pinned memory, from a device
        self._copies = [t.detach().to("cpu", non_blocking=True, copy=True) for t in tensors]
        self._event = None
        if any(t.is_cuda for t in tensors):
            self._event = torch.cuda.Event()
            self._event.record()

    @property
    def is_complete(self) -> bool:
        """Whether `read` would return at once. While a CUDA graph is captured no event may be asked: False."""
        if self._event is None:
            return True
        return not torch.cuda.is_current_stream_capturing() and self._event.query()

    def read(self) -> list[Tensor]:
        """The tensors on the host; waits for this copy alone, not for what was launched after it."""
        if not self.is_complete:
            self._event.synchronize()
        return self._copies
