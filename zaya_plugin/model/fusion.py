# SPDX-License-Identifier: Apache-2.0
"""Pure functions become one kernel each on an accelerator, by torch.compile; on a CPU they run as written.

The functions are those between matrix products, where eager mode reads and writes every intermediate. They take tensors
and numbers and keep no state, so that one compiled version serves all layers. TORCHDYNAMO_DISABLE=1 switches it off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def fused_on_accelerator(function: Callable) -> Callable:
    """`function`, compiled at its first call with a tensor on an accelerator; static shapes, one version a shape."""
    compiled = torch.compile(function, dynamic=False)

    @functools.wraps(function)
    def call(*args, **kwargs):
        on_accelerator = any(isinstance(x, torch.Tensor) and x.is_cuda for x in args)
        return (compiled if on_accelerator else function)(*args, **kwargs)

    return call
