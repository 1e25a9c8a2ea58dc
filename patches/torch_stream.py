# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.Stream: streams and events that do nothing, since CPU work is in order already."""

import torch

from zaya_plugin.patches.registry import MEGATRON, Patch


class InOrderStream:
    """A stream whose work is complete when it is submitted; also the event that record_event() returns."""

    def __init__(self, *args, **kwargs):
        self.device = torch.device("cpu")

    def wait_stream(self, stream):
        pass

    wait_event = wait_stream

    def synchronize(self):
        pass

    def record_event(self, event=None):
        return self


PATCH = Patch(
    symbol="torch.cuda.Stream",
    package="torch",
    versions=">=2.6",
    make=lambda _: InOrderStream,
    reason="raises without CUDA; training.get_model wraps the model in DDP on a side stream",
    upstream=MEGATRON + "training/training.py",
)
