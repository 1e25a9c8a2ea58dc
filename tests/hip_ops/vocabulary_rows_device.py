# SPDX-License-Identifier: Apache-2.0
"""Runs gfx942 code objects of the kernels on rows of logits, HIP's and Triton's, in the emulator, with the functions
that vocabulary_rows_cases checks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hip_ops.ops.linear_cross_entropy.hip import GRADIENT_PARTS
from hip_ops.ops.linear_cross_entropy.reference import part_size
from hip_ops.runtime.launch import ROWS_A_BLOCK
from tests.gfx942.emulator import Buffer
from tests.hip_ops.expert_path_device import SHORT, HipOnDevice, TritonOnDevice, to_torch
from tests.hip_ops.rms_norm_cases import FP32


def taken_back(tensor: Tensor, buffer: Buffer) -> None:
    """What the kernel made of the storage of `tensor`, padding too."""
    stored = to_torch(buffer.read())
    tensor.copy_(stored.as_strided(tensor.shape, tensor.stride()))


@dataclass
class HipRows(HipOnDevice):
    """hip_ops/ops/linear_cross_entropy/vocabulary_rows.hip."""

    def launch_parts(self, kernel: str, rows: int, parts: int, arguments: list) -> None:
        if rows:
            blocks = min(self.blocks, -(-rows // ROWS_A_BLOCK))
            self.counters[kernel] = self.device.launch(
                self.objects("vocabulary_rows"), kernel, (blocks, parts, 1), 256, arguments
            )

    def row_statistics(self, logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
        rows, classes = logits.shape
        out = self.out((parts, 3, rows), FP32)
        name = f"ho_row_statistics_{'' if self.aligned(logits) else 'any_'}{SHORT[logits.dtype]}"
        self.launch_parts(
            name,
            rows,
            parts,
            [
                self.rows(logits),
                self.put(labels),
                out,
                np.int64(rows),
                np.int32(classes),
                np.int64(logits.stride(0)),
                np.int64(first_class),
                np.int32(part_size(classes, parts)),
            ],
        )
        return to_torch(out.read())

    def overwrite_with_gradient(
        self, logits: Tensor, labels: Tensor, first_class: int, normalizer: Tensor, grad: Tensor, z_loss: float
    ) -> None:
        (rows, classes), given = logits.shape, self.rows(logits)
        name = f"ho_overwrite_with_gradient_{'' if self.aligned(logits) else 'any_'}{SHORT[logits.dtype]}"
        self.launch_parts(
            name,
            rows,
            GRADIENT_PARTS,
            [
                given,
                self.put(labels),
                self.rows(normalizer),
                self.put(grad),
                np.int64(rows),
                np.int32(classes),
                np.int64(logits.stride(0)),
                np.int64(normalizer.stride(0)),
                np.int64(first_class),
                np.int32(part_size(classes, GRADIENT_PARTS)),
                np.float32(z_loss),
            ],
        )
        taken_back(logits, given)


@dataclass
class TritonRows(TritonOnDevice):
    """The Triton kernels with the tiles for waves of 64. `parts` of the gradient: more than a small row would get."""

    parts: int = 2

    def run_rows(self, kernel, grid: tuple[int, int], values: dict, constexprs: dict, num_warps: int) -> None:
        if grid[0]:
            self.run(kernel, grid, values, constexprs, num_warps)

    def row_statistics(self, logits: Tensor, labels: Tensor, first_class: int, parts: int) -> Tensor:
        from hip_ops.ops.linear_cross_entropy import triton as kernels

        (rows, classes), chosen = logits.shape, kernels.launch(logits.element_size(), 64)
        out = self.out((parts, 3, rows), FP32)
        self.run_rows(
            kernels.row_statistics_kernel,
            (rows, parts),
            {
                "logits": (self.rows(logits), logits.dtype),
                "labels": (self.put(labels), torch.int64),
                "statistics": (out, FP32),
                "rows": rows,
                "classes": classes,
                "row_stride": logits.stride(0),
                "first_class": first_class,
                "size": part_size(classes, parts),
            },
            {"LANES": chosen.lanes, "WIDTH": chosen.width},
            chosen.num_warps,
        )
        return to_torch(out.read())

    def overwrite_with_gradient(
        self, logits: Tensor, labels: Tensor, first_class: int, normalizer: Tensor, grad: Tensor, z_loss: float
    ) -> None:
        from hip_ops.ops.linear_cross_entropy import triton as kernels

        (rows, classes), chosen, given = logits.shape, kernels.launch(logits.element_size(), 64), self.rows(logits)
        self.run_rows(
            kernels.row_gradient_kernel,
            (rows, self.parts),
            {
                "logits": (given, logits.dtype),
                "labels": (self.put(labels), torch.int64),
                "normalizer": (self.rows(normalizer), FP32),
                "grad": (self.put(grad), FP32),
                "classes": classes,
                "row_stride": logits.stride(0),
                "normalizer_stride": normalizer.stride(0),
                "first_class": first_class,
                "size": part_size(classes, self.parts),
                "z_loss": float(z_loss),
            },
            {"BLOCK": chosen.lanes * chosen.width},
            chosen.num_warps,
        )
        taken_back(logits, given)
