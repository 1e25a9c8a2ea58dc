# SPDX-License-Identifier: Apache-2.0
"""Runs gfx942 code objects of the kernels that make exponentials of rows of logits and gradients of these, HIP's and
Triton's, in the emulator, with the functions that vocabulary_exponentials_cases checks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hip_ops.ops.linear_cross_entropy.reference import EXPONENT_PERIOD, MAX_EXPONENT, MAX_ROUNDED, part_size
from hip_ops.runtime.launch import ROWS_A_BLOCK
from tests.hip_ops.expert_path_device import SHORT, HipOnDevice, TritonOnDevice, to_torch
from tests.hip_ops.rms_norm_cases import FP32
from tests.hip_ops.vocabulary_rows_device import taken_back

WARPS_OF_FINISH = 2  # what the launcher takes on AMD


@dataclass
class HipExponentials(HipOnDevice):
    """hip_ops/ops/linear_cross_entropy/vocabulary_exponentials.hip."""

    def launch_parts(self, kernel: str, rows: Tensor, parts: int, arguments: list) -> None:
        if len(rows):
            name = f"ho_{kernel}_{'' if self.aligned(rows) else 'any_'}{SHORT[rows.dtype]}"
            blocks = min(self.blocks, -(-len(rows) // ROWS_A_BLOCK))
            self.counters[name] = self.device.launch(
                self.objects("vocabulary_exponentials"), name, (blocks, parts, 1), 256, arguments
            )

    def overwrite_with_exponentials(self, logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
        (rows, classes), given = logits.shape, self.rows(logits)
        out = self.out((parts, 3, rows), FP32)
        self.launch_parts(
            "overwrite_with_exponentials",
            logits,
            parts,
            [
                given,
                self.put(labels),
                out,
                np.int64(rows),
                np.int32(classes),
                np.int64(logits.stride(0)),
                np.int64(first_class),
                np.int32(part_size(classes, parts)),
            ],
        )
        taken_back(logits, given)
        return to_torch(out.read())

    def finish_gradient(
        self,
        exponentials: Tensor,
        labels: Tensor,
        first_class: int,
        statistics: Tensor,
        first_part: int,
        parts: int,
        grad: Tensor,
        z_loss: float,
    ) -> Tensor:
        (rows, classes), given = exponentials.shape, self.rows(exponentials)
        out = self.out((2, rows), FP32)
        self.launch_parts(
            "finish_gradient",
            exponentials,
            1,
            [
                given,
                self.put(labels),
                self.put(statistics),
                self.put(grad),
                out,
                np.int64(rows),
                np.int32(classes),
                np.int64(exponentials.stride(0)),
                np.int64(first_class),
                np.int32(part_size(classes, parts)),
                np.int32(len(statistics)),
                np.int32(first_part),
                np.int32(parts),
                np.float32(z_loss),
            ],
        )
        taken_back(exponentials, given)
        return to_torch(out.read())


@dataclass
class TritonExponentials(TritonOnDevice):
    """The Triton kernels with the tiles for waves of 64."""

    def run_rows(self, kernel, grid: tuple[int, int], values: dict, constexprs: dict, num_warps: int) -> None:
        if grid[0]:
            self.run(kernel, grid, values, constexprs, num_warps)

    def overwrite_with_exponentials(self, logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
        from hip_ops.ops.linear_cross_entropy import triton as kernels

        (rows, classes), size, given = logits.shape, part_size(logits.shape[1], parts), self.rows(logits)
        block, warps = kernels.tile(size, logits.element_size(), warp_size=64)
        out = self.out((parts, 3, rows), FP32)
        self.run_rows(
            kernels.exponentials_kernel,
            (rows, parts),
            {
                "logits": (given, logits.dtype),
                "labels": (self.put(labels), torch.int64),
                "statistics": (out, FP32),
                "rows": rows,
                "classes": classes,
                "row_stride": logits.stride(0),
                "first_class": first_class,
                "size": size,
            },
            {
                "MAX_EXPONENT": MAX_EXPONENT,
                "EXPONENT_PERIOD": EXPONENT_PERIOD,
                "MAX_ROUNDED": MAX_ROUNDED,
                "BLOCK": block,
            },
            warps,
        )
        taken_back(logits, given)
        return to_torch(out.read())

    def finish_gradient(
        self,
        exponentials: Tensor,
        labels: Tensor,
        first_class: int,
        statistics: Tensor,
        first_part: int,
        parts: int,
        grad: Tensor,
        z_loss: float,
    ) -> Tensor:
        import triton

        from hip_ops.ops.linear_cross_entropy import triton as kernels

        (rows, classes), given, out = (
            exponentials.shape,
            self.rows(exponentials),
            self.out((2, len(exponentials)), FP32),
        )
        self.run_rows(
            kernels.finish_gradient_kernel,
            (rows, 1),
            {
                "exponentials": (given, exponentials.dtype),
                "labels": (self.put(labels), torch.int64),
                "statistics": (self.put(statistics), FP32),
                "grad": (self.put(grad), FP32),
                "losses_and_factors": (out, FP32),
                "rows": rows,
                "classes": classes,
                "row_stride": exponentials.stride(0),
                "first_class": first_class,
                "size": part_size(classes, parts),
                "all_parts": len(statistics),
                "first_part": first_part,
                "parts": parts,
                "z_loss": float(z_loss),
            },
            {"PARTS": triton.next_power_of_2(len(statistics)), "BLOCK": 1024},
            WARPS_OF_FINISH,
        )
        taken_back(exponentials, given)
        return to_torch(out.read())
