# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.current_stream: the one in-order stream there is on a CPU."""

from zaya_plugin.patches.registry import Patch
from zaya_plugin.patches.torch_stream import InOrderStream


def install() -> None:
    import torch

    stream = InOrderStream()
    torch.cuda.current_stream = lambda device=None: stream


PATCH = Patch(
    symbol="torch.cuda.current_stream",
    package="torch",
    versions=">=2.6",
    reason="raises without CUDA; DDP and checkpoint writers wait for the current stream",
    install=install,
)
