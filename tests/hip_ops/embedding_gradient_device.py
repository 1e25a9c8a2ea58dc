# SPDX-License-Identifier: Apache-2.0
"""Runs the gfx942 code of hip_ops.embedding_gradient's Triton kernels in the emulator."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.hip_ops.expert_path_device import TritonOnDevice
from tests.hip_ops.rms_norm_cases import FP32
from tests.hip_ops.vocabulary_rows_device import taken_back


@dataclass
class RowsOnDevice(TritonOnDevice):
    def add_rows_(self, total: Tensor, ids: Tensor, rows: Tensor) -> None:
        from hip_ops.triton_kernels import embedding_gradient as kernels

        (count, width), (in_order, order) = rows.shape, ids.sort(stable=True)
        parts, block = -(-count // kernels.RUN), kernels.columns_of_block(width)
        given, warps = self.rows(total), kernels.warps(block, 64)
        values = {
            "total": (given, total.dtype), "ids": (self.put(in_order), torch.int64), "order": (self.put(order), torch.int64), "rows": (self.rows(rows), rows.dtype),
            "heads": (self.out((parts, width), FP32), FP32), "tails": (self.out((parts, width), FP32), FP32), "count": count, "width": width,
            "total_stride": total.stride(0), "rows_stride": rows.stride(0),
        }  # fmt: skip
        grid = (parts, -(-width // block))
        self.run(kernels.add_runs_kernel, grid, values, {"RUN": kernels.RUN, "BLOCK": block}, warps)
        self.run(kernels.join_runs_kernel, grid, values, {"RUN": kernels.RUN, "AT_ONCE": kernels.AT_ONCE, "BLOCK": block}, warps)
        taken_back(total, given)
