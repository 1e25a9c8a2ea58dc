# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.current_stream: returns one stream that does nothing, since CPU work is in order already."""

from zaya_plugin.patches.registry import MEGATRON, Patch
from zaya_plugin.patches.torch_stream import InOrderStream

STREAM = InOrderStream()

PATCH = Patch(
    symbol="torch.cuda.current_stream",
    package="torch",
    versions=">=2.6",
    make=lambda _: lambda device=None: STREAM,
    reason="raises without CUDA; DDP and checkpoint writers wait for the current stream",
    upstream=MEGATRON + "training/training.py",
)
