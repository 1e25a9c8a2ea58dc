# SPDX-License-Identifier: Apache-2.0
"""The device of a launch and the number of its multiprocessors."""

from __future__ import annotations

import contextlib
import functools

import torch

_NO_CHANGE = contextlib.nullcontext()


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Make `device` current for Triton, which launches on the current device. Does nothing where it already is."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _NO_CHANGE
    return torch.cuda.device(device)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors or compute units. A CPU counts as one, so that blocks also loop over small
    inputs.
    """
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
