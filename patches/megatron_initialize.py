# SPDX-License-Identifier: Apache-2.0
"""megatron.training.training.initialize_megatron: gets allow_no_cuda=True, which pretrain() has no argument for."""

import functools

from zaya_plugin.patches.registry import MEGATRON, Patch

PATCH = Patch(
    symbol="megatron.training.training.initialize_megatron",
    make=lambda stock: functools.partial(stock, allow_no_cuda=True),
    reason="asserts CUDA unless allow_no_cuda is given, and pretrain() has no argument for it",
    upstream=MEGATRON + "training/training.py",
)
