# SPDX-License-Identifier: Apache-2.0
"""A matrix product into a given tensor, by torch and its library."""

from __future__ import annotations

import torch
from torch import Tensor

from hip_ops.runtime import main_grad


def dense_product_(out: Tensor, a: Tensor, b: Tensor, accumulate: bool) -> None:
    """Compute out = a b, or out += a b with `accumulate`. Sums are fp32; with an fp32 `out` nothing is rounded before it,
    unless `main_grad.way_of_adding` is "rounded".
    """
    way = main_grad.way_of_adding(out, a)
    if accumulate:
        main_grad.add_product_(out, a.t(), b)
    elif way == "same":
        torch.mm(a, b, out=out)
    elif way == "converted":
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
    elif way == "rounded":
        out.copy_(a @ b)
    else:
        torch.ops.aten.mm.dtype_out(a, b, torch.float32, out=out)
