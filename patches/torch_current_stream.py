# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.current_stream: the in-order stream of patches/torch_stream.py."""

from zaya_plugin.patches.registry import Patch


def install() -> None:
    import torch

    from zaya_plugin.patches import torch_stream

    torch_stream.install()
    stream = torch.cuda.Stream()
    torch.cuda.current_stream = lambda device=None: stream


PATCH = Patch(
    symbol="torch.cuda.current_stream",
    package="torch",
    versions=">=2.6",
    reason="raises without CUDA; checkpoint saving and DDP wait on the current stream",
    install=install,
)
