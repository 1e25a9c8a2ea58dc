# SPDX-License-Identifier: Apache-2.0
"""torch.cuda.stream: entering a stream changes nothing where there is one order of work."""

from zaya_plugin.patches.registry import Patch


def install() -> None:
    import contextlib

    import torch

    torch.cuda.stream = lambda stream=None: contextlib.nullcontext()


PATCH = Patch(
    symbol="torch.cuda.stream",
    package="torch",
    versions=">=2.6",
    reason="raises without CUDA; Megatron enters side streams for copies and capture",
    install=install,
)
