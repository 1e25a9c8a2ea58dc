# SPDX-License-Identifier: Apache-2.0
"""The division of all gradients by the number of tokens, put off until the optimizer reads them anyway.

Megatron's finalize_model_grads multiplies the whole of every gradient buffer by 1 / num_tokens in a pass of its own: with
ZeRO-1 over N ranks, N times what a rank will read. Here the buffers remember the factor on the device.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class DeferredScale:
    """Takes the place of `scale_gradients` of DDP's gradient buffers; whoever reads the gradients has to multiply by `factor`.

    factor: fp32 scalar on the device, 1 after `reset`. Everything is on the device, so it works as part of a CUDA graph too.
    """

    def __init__(self, buffers: Iterable, device: torch.device | str):
        self.factor = torch.ones((), dtype=torch.float32, device=device)
        self._scaled: set[int] = set()
        self._by: Tensor | float | None = None
        self._buffers = list(buffers)
        for i, buffer in enumerate(self._buffers):
            buffer.scale_gradients = _OfBuffer(self, i)

    def scale(self, index: int, scaling_factor: Tensor | float) -> None:
        """Buffer `index` is to be scaled. Megatron scales all buffers by the same number, one after another."""
        if not self._scaled:
            self._by = scaling_factor
            self.factor.mul_(scaling_factor.reshape(()) if isinstance(scaling_factor, Tensor) else scaling_factor)
        assert self._by is scaling_factor and index not in self._scaled, (
            "all gradient buffers are scaled by one number, each once"
        )
        self._scaled.add(index)
        if len(self._scaled) == len(self._buffers):
            self._scaled.clear()
            self._by = None

    def reset(self) -> None:
        """The buffers are zero again, or scaled."""
        self.factor.fill_(1.0)
        self._scaled.clear()


class _OfBuffer:
    """`scale_gradients` of one buffer. factor: what its contents are still to be multiplied by."""

    def __init__(self, deferred: DeferredScale, index: int):
        self.deferred, self.index = deferred, index

    @property
    def factor(self) -> Tensor:
        return self.deferred.factor

    def __call__(self, scaling_factor: Tensor | float) -> None:
        self.deferred.scale(self.index, scaling_factor)
