# SPDX-License-Identifier: Apache-2.0
"""Tests of what must not wait for the device."""

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """An error for what makes the host wait for the device, as far as torch notices it."""
    torch.cuda.synchronize()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)
