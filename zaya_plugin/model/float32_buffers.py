# SPDX-License-Identifier: Apache-2.0
"""Buffers that stay fp32 when a module is cast: `.bfloat16()`, `.half()` and Megatron's Float16Module cast them all."""

from __future__ import annotations

import torch


class Float32BuffersMixin:
    """Put before nn.Module among the bases: the fp32 buffers of the class follow device moves, not dtype casts."""

    def _apply(self, fn, recurse=True):
        kept = {name: b for name, b in self._buffers.items() if b is not None and b.dtype == torch.float32}
        super()._apply(fn, recurse)
        for name, before in kept.items():
            after = self._buffers[name]
            # A meta buffer has no values to keep; the new storage stays uninitialised, as to_empty promises.
            self._buffers[name] = after.float() if before.is_meta else before.to(after.device)
        return self
