# SPDX-License-Identifier: Apache-2.0
"""Runs the Triton RMSNorm and LayerNorm kernels, compiled for gfx942, in the emulator as an Implementation of rms_norm_cases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tests.gfx942.emulator import Device
from tests.gfx942.triton_objects import triton_code_object
from tests.hip_ops.rms_norm_cases import BF16, FP32, VECTORS, Case, Implementation, Inputs
from tests.hip_ops.rms_norm_device import Emulated, to_numpy, to_torch

NAMES = {BF16: "*bf16", FP32: "*fp32"}


@dataclass
class EmulatedTriton(Emulated):
    """`processors`: programs of the loops over rows are those of this number of multiprocessors."""

    device: Device

    @property
    def implementation(self) -> Implementation:
        return Implementation(self.forward, self.backward)

    def run(
        self, kernel, programs: int, values: dict, dtypes: dict[str, torch.dtype], constexprs: dict, num_warps: int
    ) -> None:
        """values: run-time arguments by name, None for one that the kernel does not have; a pointer's type is in
        `dtypes`, or fp32.
        """
        constexprs = constexprs | {name: None for name in kernel.arg_names if values.get(name, 0) is None}
        signature, given, divisible = {}, [], []
        for name in kernel.arg_names:
            if name in constexprs:
                continue
            value = values[name]
            given.append(value)
            if isinstance(value, (int, float)):
                signature[name] = "i32" if isinstance(value, int) else "fp32"
                given[-1] = np.int32(value) if isinstance(value, int) else np.float32(value)
                if isinstance(value, int) and value % 16 == 0:
                    divisible.append(name)
            else:
                signature[name] = NAMES[dtypes.get(name, FP32)]
                divisible.append(name)
        compiled = triton_code_object(kernel, signature, constexprs, num_warps=num_warps, divisible_by_16=divisible)
        self.counters[kernel.__name__] = compiled.launch(self.device, (programs, 1, 1), given)

    def programs(self, chosen, rows: int) -> int:
        tiles = -(-rows // chosen.rows)
        most = self.processors * (chosen.programs or tiles)
        return -(-tiles // -(-tiles // most))

    def shared_values(self, i: Inputs) -> tuple[dict, dict[str, torch.dtype]]:
        case, stride = i.case, i.case.hidden + i.case.pad
        merge, weight = self.vectors(i)
        values = dict(zip(VECTORS[:4], merge if case.scaled else [weight] * 4, strict=True))
        values |= {
            "weight": weight,
            "rows": case.rows,
            "hidden": case.hidden,
            "x_stride": stride,
            "residual_stride": stride,
        }
        values["bias"] = self.device.put(to_numpy(i.bias)) if case.centered else None
        vectors = (*VECTORS, "bias")
        dtypes = dict.fromkeys((*vectors, "y", "dy", *(f"d_{name}" for name in vectors)), case.weight_dtype)
        dtypes |= dict.fromkeys(("x", "d_x"), case.x_dtype)
        return values, dtypes | dict.fromkeys(
            ("residual", "new_residual", "d_residual", "d_new_residual"), case.residual_dtype
        )

    def forward(self, i: Inputs) -> tuple[Tensor, ...]:
        from hip_ops.ops.rms_norm import triton as kernels

        case, chosen = i.case, kernels.launch(i.case.hidden, scaled=i.case.scaled, backward=False, warp_size=64)
        shape = (case.rows, case.hidden)
        y, new_residual = self.out(shape, case.weight_dtype), self.out(shape, case.residual_dtype)
        *mean, rstd = self.statistics(case)
        values, dtypes = self.shared_values(i)
        values |= {
            "x": self.rows(i.x, case),
            "residual": self.rows(i.residual, case),
            "y": y,
            "new_residual": new_residual,
            "mean": mean[0] if mean else None,
            "rstd": rstd,
            "eps": case.eps,
        }
        constexprs = {
            "SCALED": case.scaled,
            "CENTERED": case.centered,
            "ROWS": chosen.rows,
            "BLOCK": chosen.columns,
            "STAGES": chosen.stages,
        }
        self.run(
            kernels.rms_norm_forward_kernel,
            self.programs(chosen, case.rows),
            values,
            dtypes,
            constexprs,
            chosen.num_warps,
        )
        return tuple(to_torch(b.read()) for b in (y, new_residual, *mean, rstd))

    def backward(self, i: Inputs, new_residual: Tensor, *statistics: Tensor) -> dict[str, Tensor]:
        from hip_ops.ops.rms_norm import triton as kernels

        case: Case = i.case
        chosen, shape = (
            kernels.launch(case.hidden, scaled=case.scaled, backward=True, warp_size=64),
            (case.rows, case.hidden),
        )
        programs = self.programs(chosen, case.rows)
        dy, d_x, d_residual = self.rows(i.dy, case), self.out(shape, case.x_dtype), self.out(shape, case.residual_dtype)
        partial = self.out((programs, (4 if case.scaled else 1) + case.centered, case.hidden), FP32)
        values, dtypes = self.shared_values(i)
        stride, upstream = case.hidden + case.pad, self.rows(i.d_new_residual, case)
        if upstream is None:
            dtypes["d_new_residual"] = case.weight_dtype
        x, residual = (i.x, i.residual) if case.scaled else (i.dy, new_residual)
        values |= {
            "dy": dy,
            "d_new_residual": dy if upstream is None else upstream,
            "x": self.rows(x, case),
            "residual": self.rows(residual, case),
            "mean": self.device.put(statistics[0].numpy()) if case.centered else None,
            "rstd": self.device.put(statistics[-1].numpy()),
            "d_x": d_x,
            "d_residual": d_residual,
            "partial": partial,
            "dy_stride": stride,
            "d_new_residual_stride": stride,
        }
        constexprs = {
            "SCALED": case.scaled,
            "CENTERED": case.centered,
            "HAS_D_NEW_RESIDUAL": upstream is not None,
            "WRITES_D_X": case.scaled or case.x_dtype != case.residual_dtype,
            "ROWS": chosen.rows,
            "BLOCK": chosen.columns,
            "STAGES": chosen.stages,
        }
        self.run(kernels.rms_norm_backward_kernel, programs, values, dtypes, constexprs, chosen.num_warps)
        names = (*VECTORS, "bias") if case.centered else VECTORS
        gradients = {f"d_{name}": self.out((case.hidden,), case.weight_dtype) for name in names}
        values = (
            {name: values[name] for name in VECTORS[:4]}
            | {"d_bias": None}
            | gradients
            | {"partial": partial, "programs": programs, "hidden": case.hidden}
        )
        constexprs = {"SCALED": case.scaled, "CENTERED": case.centered, "PROGRAMS": 64, "BLOCK": 32}
        self.run(kernels.rms_norm_sum_kernel, -(-case.hidden // 32), values, dtypes, constexprs, 8)
        found = {
            "d_x": d_x if constexprs["SCALED"] or case.x_dtype != case.residual_dtype else d_residual,
            "d_residual": d_residual,
        }
        found |= {name: each for name, each in gradients.items() if case.scaled or name in ("d_weight", "d_bias")}
        return {key: to_torch(buffer.read()) for key, buffer in found.items()}
