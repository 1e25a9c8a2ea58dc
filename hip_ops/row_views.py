# SPDX-License-Identifier: Apache-2.0
"""Tensors as the rows that row kernels take: any distance between rows, none within one."""

from __future__ import annotations

import math

from torch import Tensor


def as_rows(tensor: Tensor) -> Tensor:
    """[..., h] as [rows, h] with contiguous rows; a copy only where no such view exists."""
    if tensor.dim() == 2:
        flat = tensor
    elif tensor.dim() > 2:
        flat = tensor.flatten(0, -2)
    else:
        flat = tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])
    return flat if flat.stride(1) == 1 or flat.shape[1] < 2 else flat.contiguous()
