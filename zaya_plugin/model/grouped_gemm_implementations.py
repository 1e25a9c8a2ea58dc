# SPDX-License-Identifier: Apache-2.0
"""The grouped GEMMs that a platform may bring, behind one interface. Each imports what it needs at first use.

`available(device, dtype)` says why one cannot be had, or None; `takes(*tensors)` whether it takes these strides and addresses. `forms` are
those it computes: ROWS_T, x W_e^T with W_e stored [n, k]; ROWS, x W_e with W_e stored [k, n]; OUTER, a_e^T b_e.

Left out, because each call waits for the host: Transformer Engine's general_grouped_gemm (rows per expert as a Python list;
`transformer_impl=transformer_engine` uses it all the same) and AITER's gmm (counts its tiles with .item()).
"""

from __future__ import annotations

import importlib
import importlib.util

import torch
from torch import Tensor

from zaya_plugin.model.main_grad import add_or_write
from zaya_plugin.model.quack_grouped_gemm import QuackGroupedGemm

PRIMUS_TURBO = "primus_turbo.pytorch.ops"  # imported where it is used; nothing here depends on it
ROWS_T, ROWS, OUTER = FORMS = ("rows_t", "rows", "outer")
_grouped_mm = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_GROUPED_DTYPES = {"cpu": (torch.float32, torch.bfloat16), "cuda": (torch.bfloat16,)}


def has_grouped_mm(*tensors: Tensor) -> bool:
    """Whether torch's grouped_mm takes these tensors: device, dtype, and strides and addresses in steps of 16 bytes."""
    return TORCH.available(tensors[0].device, tensors[0].dtype) is None and TORCH.takes(*tensors)


class TorchGroupedGemm:
    """torch.nn.functional.grouped_mm (CUTLASS on NVIDIA, Composable Kernel or a loop on ROCm, by torch's build)."""

    name, forms = "torch", FORMS

    def available(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if _grouped_mm is None:
            return f"torch {torch.__version__} has no grouped_mm"
        if dtype not in _GROUPED_DTYPES.get(device.type, ()):
            return f"torch's grouped_mm does not take {dtype} on {device.type}"
        return None

    def takes(self, *tensors: Tensor) -> bool:
        return all(
            t.data_ptr() % 16 == 0 and all(stride == 1 or stride * t.itemsize % 16 == 0 for stride in t.stride())
            for t in tensors
        )

    def rows(self, x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
        return _grouped_mm(x, matrices, offs=offsets)

    def outer(self, a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
        return _grouped_mm(a.t(), b, offs=offsets)

    def add_outer(self, total: Tensor, a: Tensor, b: Tensor, offsets: Tensor, accumulate: bool = True) -> None:
        add_or_write(total, self.outer(a, b, offsets), accumulate)


class TritonGroupedGemm:
    """hip_ops.grouped_rows and grouped_outer_, compared with a loop at their first use; adds to fp32 blocks with no pass of its own."""

    name, forms = "triton", FORMS

    def available(self, device: torch.device, dtype: torch.dtype) -> str | None:
        from hip_ops import backend, grouped_product

        if dtype not in grouped_product.HALF:
            return f"hip_ops' grouped products do not take {dtype}"
        order = backend.choose(device).order
        if "triton" not in order:
            return f"hip_ops' backend on {device.type} is {order[0]}"
        return grouped_product.wrong_on(device)

    def takes(self, *tensors: Tensor) -> bool:
        return True

    def rows(self, x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
        from hip_ops import grouped_rows

        return grouped_rows(x, matrices, offsets)

    def outer(self, a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
        from hip_ops import grouped_outer_

        return grouped_outer_(a.new_empty(len(offsets), a.shape[1], b.shape[1]), a, b, offsets, accumulate=False)

    def add_outer(self, total: Tensor, a: Tensor, b: Tensor, offsets: Tensor, accumulate: bool = True) -> None:
        from hip_ops import grouped_outer_

        grouped_outer_(total, a, b, offsets, accumulate)


class PrimusTurboGroupedGemm:
    """primus_turbo.pytorch.ops.grouped_gemm(a, b, group_lens, trans_b=...), which AMD's Primus brings. Not verified: it never ran here.

    Written from its source (AMD-AGI/Primus-Turbo, commit 030adb5). It wants as many rows as the experts have together, so rows of no expert go to the
    last one: they come out as anything, as they may. Its product over rows of variable number is internal to its autograd function: left out.
    """

    name, forms = "primus_turbo", (ROWS_T, ROWS)

    def available(self, device: torch.device, dtype: torch.dtype) -> str | None:
        if importlib.util.find_spec("primus_turbo") is None:
            return "primus_turbo is not installed"
        if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
            return f"primus_turbo's grouped_gemm does not take {dtype} on {device.type}"
        return None

    def takes(self, *tensors: Tensor) -> bool:
        return all(t.is_contiguous() or t.mT.is_contiguous() for t in tensors)

    def rows(self, x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
        grouped_gemm = importlib.import_module(PRIMUS_TURBO).grouped_gemm

        ends = offsets.long()
        ends[-1] = len(x)
        lengths = torch.diff(ends, prepend=ends.new_zeros(1))
        with torch.no_grad():
            if matrices.is_contiguous():
                return grouped_gemm(x.contiguous(), matrices, lengths)
            return grouped_gemm(x.contiguous(), matrices.mT, lengths, trans_b=True)


TORCH = TorchGroupedGemm()
IMPLEMENTATIONS = {
    each.name: each for each in (TORCH, TritonGroupedGemm(), QuackGroupedGemm(), PrimusTurboGroupedGemm())
}
