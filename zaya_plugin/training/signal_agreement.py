# SPDX-License-Identifier: Apache-2.0
"""Whether any rank was told to end, without a wait in every step.

Megatron gathers all ranks' flags after each step and reads them, which waits for everything the device has to do. Here the
step before is read: its answer lies on the host already. A run ends one step later for it, and on all ranks at the same one.
"""

from __future__ import annotations

import torch

from zaya_plugin.optim.host_copy import HostCopy


class AgreedSignal:
    """Takes the place of Megatron's DistributedSignalHandler in its loop.

    Args:
        handler: Megatron's, installed.
        device: of the process group's collectives; on "cpu" the answer is of this step.
    """

    def __init__(self, handler, device: torch.device | int | str):
        self.handler = handler
        self.device = torch.device(device)
        self._before: HostCopy | None = None

    def signals_received(self) -> list[int]:
        """[1] where any rank had received the signal, else [0]; the same on all ranks, which must all ask."""
        flag = torch.full((1,), int(self.handler._signal_received), dtype=torch.int32, device=self.device)
        torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX)
        now = HostCopy([flag])
        before, self._before = self._before, now
        answer = now if self.device.type == "cpu" else before
        return [0] if answer is None else answer.read()[0].tolist()
