# SPDX-License-Identifier: Apache-2.0
"""Runs Triton's grouped products, compiled for gfx942, in the emulator: the functions that grouped_cases checks."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from hip_ops.ops.grouped_product.configs import GroupedConfig, choose_config
from tests.gfx942.emulator import Counters, Device
from tests.gfx942.inner_loop import mfma_passes
from tests.gfx942.toolchain import ARCH
from tests.gfx942.triton_cases import grouped_product
from tests.gfx942.triton_objects import TritonObject, triton_code_object
from tests.hip_ops.expert_path_device import NUMPY, TYPES, to_numpy, to_torch

NUMPY = {**NUMPY, torch.float16: np.uint16}
TYPES = {**TYPES, torch.float16: "*fp16"}
SMALL = replace(
    choose_config(ARCH, "rows", 1, 1, 1), block_m=32, block_n=32, block_k=32, num_warps=1, matrix_instr_nonkdim=32
)
# Tensors that lie in Megatron's buffers.
IN_A_BUFFER = {"grouped_pointer_rows_kernel": ("w_pointer",), "grouped_pointer_outer_kernel": ("out_pointer",)}


@dataclass
class GroupedOnDevice:
    """programs: how many walk the tiles; XCDs are not emulated by their number, but the order of tiles over eight of
    them is the kernel's. small: all tensors are compiled as below 2 GiB, hence for buffer instructions; None: all but
    the experts' matrices and main gradients, as in training.
    """

    device: Device = field(default_factory=Device)
    config: GroupedConfig = SMALL
    programs: int = 3
    small: bool | None = False
    counters: Counters | None = None
    code: TritonObject | None = None

    def run(self, kernel, tensors: dict[str, tuple], sizes: dict[str, int], constants: dict) -> None:
        c = self.config
        constants = {
            "EXPERTS": 1 << (sizes["experts"] - 1).bit_length(),
            "BLOCK_M": c.block_m,
            "BLOCK_N": c.block_n,
            "BLOCK_K": c.block_k,
            "GROUP": c.group,
            "XCDS": 8,
            **constants,
        }
        signature = {
            name: TYPES[tensors[name][1]] if name in tensors else "i32"
            for name in kernel.arg_names
            if name not in constants
        }
        small = {
            True: [*tensors],
            False: [],
            None: [name for name in tensors if name not in IN_A_BUFFER[kernel.__name__]],
        }
        divisible = [name for name in signature if name in tensors or sizes[name] % 16 == 0]
        self.code = triton_code_object(
            kernel, signature, constants, divisible_by_16=divisible, small=small[self.small], **c.launch_options()
        )
        given = [tensors[name][0] if name in tensors else np.int32(sizes[name]) for name in signature]
        self.counters = self.code.launch(self.device, (self.programs, 1, 1), given)

    def put(self, x: Tensor) -> tuple:
        """The storage of rows as it lies, without what follows the last row's end."""
        flat = (
            x.as_strided((max(0, (len(x) - 1) * x.stride(0) + x.shape[1]),), (1,)) if x.dim() == 2 else x.contiguous()
        )
        return self.device.put(to_numpy(flat)), x.dtype

    def grouped_rows(self, x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
        from hip_ops.ops.grouped_product.triton_kernels import grouped_pointer_rows_kernel

        experts, k, n = matrices.shape
        transposed = matrices.stride(2) != 1
        stored = matrices.mT if transposed else matrices
        out = self.device.alloc((len(x), n), NUMPY[x.dtype])
        tensors = {
            "x_pointer": self.put(x),
            "w_pointer": self.put(stored),
            "out_pointer": (out, x.dtype),
            "offsets": self.put(offsets),
        }
        sizes = dict(
            experts=experts, n=n, k=k, x_stride=x.stride(0), w_matrix=stored.stride(0), w_stride=stored.stride(1)
        )
        self.run(
            grouped_pointer_rows_kernel,
            tensors,
            sizes,
            {"TRANSPOSED": transposed, "EVEN_K": k % self.config.block_k == 0},
        )
        return to_torch(out.read()).view(x.dtype)

    def grouped_outer_(self, out: Tensor, a: Tensor, b: Tensor, offsets: Tensor, accumulate: bool) -> None:
        from hip_ops.ops.grouped_product.triton_kernels import grouped_pointer_outer_kernel

        experts, m, n = out.shape
        buffer, _ = self.put(out)
        tensors = {
            "a_pointer": self.put(a),
            "b_pointer": self.put(b),
            "out_pointer": (buffer, out.dtype),
            "offsets": self.put(offsets),
        }
        sizes = dict(
            experts=experts, m=m, n=n, a_stride=a.stride(0), b_stride=b.stride(0), out_matrix=m * n, out_stride=n
        )
        self.run(grouped_pointer_outer_kernel, tensors, sizes, {"ACCUMULATE": accumulate})
        out.copy_(to_torch(buffer.read()).view(out.dtype).view_as(out))


def lds_time(kind: str, config: GroupedConfig) -> float:
    """LDS cycles of a step of the inner loop relative to its MFMA time: of a tile with many steps less one with few."""
    compiled, totals = grouped_product(kind, config), []
    for k in (128, 384):
        device = Device(allow_shifted_waves=True)
        shapes = {
            "rows_t": ((config.block_m, k), (config.block_n, k)),
            "rows": ((config.block_m, k), (k, config.block_n)),
            "outer": ((k, config.block_m), (k, config.block_n)),
        }[kind]
        a, b = (device.put(np.zeros(shape, np.uint16)) for shape in shapes)
        m, n, outer = config.block_m, config.block_n, kind == "outer"
        out = device.put(np.zeros((m, n), np.float32 if outer else np.uint16))
        sizes = (1, m, n, m, n, m * n, n) if outer else (1, n, k, k, n * k, shapes[1][1])
        offsets = device.put(np.full(16, k if outer else m, np.int32))
        found = compiled.launch(device, 1, [a, b, out, offsets, *map(np.int32, sizes)])
        # a pass takes 4 cycles, and the passes of four SIMDs run at the same time
        totals.append(
            (found.lds_cycles, sum(mfma_passes(name) * count for name, count in found.mfma_by_opcode.items()))
        )
    (few, short), (many, long) = totals
    return (many - few) / (long - short)
