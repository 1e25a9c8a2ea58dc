# SPDX-License-Identifier: Apache-2.0
"""Host side of gradient_addition.hip. Same function as reference.py."""

from __future__ import annotations

from torch import Tensor

from hip_ops.runtime.launchers import call


def add_gradient_(total: Tensor, part: Tensor) -> None:
    """As reference.add_gradient_; total fp32 and part bf16, both contiguous."""
    if count := total.numel():
        aligned = (total.data_ptr() | part.data_ptr() | count * part.element_size()) % 16 == 0
        call("ho_add_gradient", total, part, count, aligned, device=total.device)
