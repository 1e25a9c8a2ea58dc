# SPDX-License-Identifier: Apache-2.0
"""The device of a launch and the number of its multiprocessors."""

from __future__ import annotations

import contextlib
import functools

import torch

_HERE = contextlib.nullcontext()


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device, and autograd's or a caller's may be another. Nothing is switched where it is the same."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors or compute units. A CPU counts as one, so that blocks of small inputs loop there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
