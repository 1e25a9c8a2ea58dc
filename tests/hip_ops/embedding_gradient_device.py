# SPDX-License-Identifier: Apache-2.0
"""Runs gfx942 code objects of hip_ops.embedding_gradient's kernels, HIP's and Triton's, in the emulator."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.hip_ops.cpu_kernels import cpu_kernels
from tests.hip_ops.expert_path_device import SHORT, HipOnDevice, TritonOnDevice
from tests.hip_ops.rms_norm_cases import FP32
from tests.hip_ops.vocabulary_rows_device import taken_back

THREADS = 256


@dataclass
class HipRows(HipOnDevice):
    """hip_ops/ops/embedding_gradient/embedding_gradient.hip."""

    def launch_columns(self, kernel: str, runs: int, width: int, columns: int, arguments: list) -> None:
        """columns: of a lane."""
        grid = (runs, -(-width // (THREADS * columns)), 1)
        self.counters[kernel] = self.device.launch(self.objects("embedding_gradient"), kernel, grid, THREADS, arguments)

    def add_rows_(self, total: Tensor, ids: Tensor, rows: Tensor) -> None:
        (count, width), (in_order, order) = rows.shape, ids.sort(stable=True)
        runs = -(-count // cpu_kernels("embedding_gradient").ho_add_rows_run())
        if not runs:
            return
        aligned, size = self.aligned(total, rows), rows.element_size()
        given, sorted_ids = self.rows(total), self.put(in_order)
        heads, tails = self.out((runs, width), FP32), self.out((runs, width), FP32)
        self.launch_columns(
            f"ho_add_runs_{'' if aligned else 'any_'}{SHORT[rows.dtype]}",
            runs,
            width,
            16 // size if aligned else 1,
            [
                given,
                sorted_ids,
                self.put(order),
                self.rows(rows),
                heads,
                tails,
                np.int64(count),
                np.int32(width),
                np.int64(total.stride(0)),
                np.int64(rows.stride(0)),
            ],
        )
        self.launch_columns(
            f"ho_join_runs{'' if aligned else '_any'}",
            runs,
            width,
            4 if aligned else 1,
            [given, sorted_ids, heads, tails, np.int64(count), np.int32(width), np.int64(total.stride(0))],
        )
        taken_back(total, given)


@dataclass
class TritonRows(TritonOnDevice):
    """The Triton kernels with the blocks for waves of 64."""

    def add_rows_(self, total: Tensor, ids: Tensor, rows: Tensor) -> None:
        from hip_ops.ops.embedding_gradient import triton as kernels

        (count, width), (in_order, order) = rows.shape, ids.sort(stable=True)
        parts, block = -(-count // kernels.RUN), kernels.columns_of_block(width)
        given, warps = self.rows(total), kernels.warps(block, 64)
        values = {
            "total": (given, total.dtype),
            "ids": (self.put(in_order), torch.int64),
            "order": (self.put(order), torch.int64),
            "rows": (self.rows(rows), rows.dtype),
            "heads": (self.out((parts, width), FP32), FP32),
            "tails": (self.out((parts, width), FP32), FP32),
            "count": count,
            "width": width,
            "total_stride": total.stride(0),
            "rows_stride": rows.stride(0),
        }
        grid = (parts, -(-width // block))
        self.run(kernels.add_runs_kernel, grid, values, {"RUN": kernels.RUN, "BLOCK": block}, warps)
        self.run(
            kernels.join_runs_kernel,
            grid,
            values,
            {"RUN": kernels.RUN, "AT_ONCE": kernels.AT_ONCE, "BLOCK": block},
            warps,
        )
        taken_back(total, given)
