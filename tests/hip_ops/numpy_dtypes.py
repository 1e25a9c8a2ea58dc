# SPDX-License-Identifier: Apache-2.0
"""bf16 for processes without torch: numpy arrays of its bits."""

import numpy as np


def bits(values: np.ndarray, size: int) -> np.ndarray:
    """Numbers that the dtype of `size` bytes holds exactly: fp32 for 4, the bits of bf16 for 2."""
    values = np.ascontiguousarray(values, np.float32)
    return values if size == 4 else (values.view(np.uint32) >> 16).astype(np.uint16)


def values(array: np.ndarray) -> np.ndarray:
    """The numbers of what `bits` gave, fp32."""
    return array if array.dtype == np.float32 else (array.astype(np.uint32) << 16).view(np.float32)
