# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.Stream: streams and events that do nothing, since CPU work is in order already."""

from zaya_plugin.patches.registry import Patch


class InOrderStream:
    """A stream whose work is done when it was given; also the event that its record_event() returns."""

    def __init__(self, *args, **kwargs):
        import torch

        self.device = torch.device("cpu")

    def wait_stream(self, stream):
        pass

    def wait_event(self, event):
        pass

    def synchronize(self):
        pass

    def record_event(self, event=None):
        return self


def install() -> None:
    import torch

    torch.cuda.Stream = InOrderStream


PATCH = Patch(
    symbol="torch.cuda.Stream",
    package="torch",
    versions=">=2.6",
    reason="raises without CUDA; training.get_model wraps the model in DDP on a side stream",
    install=install,
)
