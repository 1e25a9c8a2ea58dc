# SPDX-License-Identifier: Apache-2.0
"""Makes Triton's tensor descriptors on the host for each launch; Triton's own checks run once per shape."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # Triton before 3.4. AMD's devices use none, so the modules that import this one still work there
    TensorDescriptor = None

MAX_CHECKED_DESCRIPTORS = 4096
_checked: dict[tuple, dict] = {}
_thread = threading.local()


def descriptor(base: Tensor, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]) -> TensorDescriptor:
    """Return TensorDescriptor(base, shape, strides, block). base.data_ptr() must be a multiple of 16
    (launch.py, `describable`).
    """
    if base.is_cuda and not hasattr(_thread, "context"):
        # the driver encodes descriptors only in a thread with a CUDA context, which autograd's threads may lack
        torch.cuda.set_device(torch.cuda.current_device())
        _thread.context = True
    key = (*shape, *strides, *block, base.dtype)
    known = _checked.get(key)
    if known is None:
        tensor_descriptor = TensorDescriptor(base, list(shape), list(strides), list(block))
        if len(_checked) >= MAX_CHECKED_DESCRIPTORS:
            _checked.clear()
        _checked[key] = {name: value for name, value in vars(tensor_descriptor).items() if name != "base"}
        return tensor_descriptor
    tensor_descriptor = TensorDescriptor.__new__(TensorDescriptor)
    tensor_descriptor.__dict__.update(known, base=base)
    return tensor_descriptor
