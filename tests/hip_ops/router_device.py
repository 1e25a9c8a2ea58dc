# SPDX-License-Identifier: Apache-2.0
"""Runs Triton's kernels of the router, compiled for gfx942, in the emulator: the functions that router_cases checks."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hip_ops.ops.router_mlp.reference import SUM_NAMES
from hip_ops.saved_bytes import router_columns
from tests.gfx942.emulator import Counters, Device
from tests.gfx942.triton_cases import NOT_SMALL, router_constants, router_launch
from tests.gfx942.triton_objects import TritonObject, triton_code_object
from tests.hip_ops.expert_path_device import NUMPY, TYPES, to_numpy, to_torch

RESULTS = ("state", "weights", "ids", "hidden1", "hidden2", "logits", "statistics")
CHAIN = ("d_projected", "d_hidden1", "normed", "d_hidden2", "active1", "active2")


@dataclass
class RouterOnDevice:
    """counters: of the last launch. codes: of the last launch of each kernel, by forward, backward and parameters."""

    device: Device = field(default_factory=Device)
    counters: Counters | None = None
    codes: dict[str, TritonObject] = field(default_factory=dict)

    def run(
        self,
        which: str,
        given: dict[str, Tensor | None],
        results: dict[str, tuple],
        flags: dict,
        w_out: Tensor,
        rows: int,
        eps: float = 0.0,
        unweighted: int = -1,
    ) -> dict:
        """results: shape and dtype of what the kernel writes. Absent tensors are any pointer of the right type, as in
        the launcher.
        """
        from hip_ops.ops.router_mlp import triton_kernels

        kernel = getattr(triton_kernels, f"router_mlp_{which}_kernel")
        classes, width = w_out.shape
        chosen = router_launch(which, width, warp_size=64)
        constants = router_constants(width, classes, chosen) | flags
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        outs = {name: self.device.alloc(shape, NUMPY[dtype]) for name, (shape, dtype) in results.items()}
        types = {name: TYPES[dtype] for name, (_, dtype) in results.items()} | {
            "rows": "i32",
            "eps": "fp32",
            "unweighted": "i32",
        }
        numbers = {"rows": np.int32(rows), "eps": np.float32(eps), "unweighted": np.int32(unweighted)}
        types |= {
            name: "*i64" if name == "forced" else TYPES[w_out.dtype if tensor is None else tensor.dtype]
            for name, tensor in given.items()
        }
        signature = {name: types[name] for name in kernel.arg_names if name not in constants}
        pointers = [name for name, kind in signature.items() if kind.startswith("*")]
        self.codes[which] = triton_code_object(
            kernel,
            signature,
            constants,
            num_warps=chosen.num_warps,
            num_stages=chosen.stages,
            divisible_by_16=[name for name in pointers if name != "biases"],
            small=[name for name in pointers if name not in NOT_SMALL],  # as in training
        )
        put = (
            {name: None if tensor is None else self.device.put(to_numpy(tensor)) for name, tensor in given.items()}
            | outs
            | numbers
        )
        grid = chosen.grid(rows, *((2 * width * width // chosen.columns,) if which == "parameters" else ()))
        self.counters = self.codes[which].launch(self.device, grid, [put[name] for name in signature])
        return {name: to_torch(buffer.read()) for name, buffer in outs.items()}

    def programs(self, which: str, rows: int, width: int) -> int:
        return router_launch(which, width, warp_size=64).grid(rows)[0]

    def router_mlp(
        self, projected, previous, gamma, b_down, w_norm, w1, b1, w2, b2, w_out, biases, forced, eps, unweighted
    ):
        (rows, width), classes, dtype = projected.shape, len(w_out), projected.dtype
        given = dict(
            projected=projected,
            previous=previous,
            gamma=gamma,
            b_down=b_down,
            w_norm=w_norm,
            w1=w1,
            b1=b1,
            w2=w2,
            b2=b2,
            w_out=w_out,
            biases=biases,
            forced=forced,
        )
        results = dict.fromkeys(("state", "hidden1", "hidden2"), ((rows, width), dtype)) | {
            "weights": ((rows,), torch.float32),
            "ids": ((rows,), torch.int64),
            "logits": ((rows, router_columns(classes)), dtype),
            "statistics": ((self.programs("forward", rows, width), classes + 1), torch.float32),
        }
        found = self.run(
            "forward",
            given,
            results,
            {"HAS_PREVIOUS": gamma is not None, "HAS_FORCED": forced is not None},
            w_out,
            rows,
            eps,
            unweighted,
        )
        found["statistics"] = found["statistics"].sum(0)
        return tuple(found[name] for name in RESULTS)

    def router_mlp_backward(
        self,
        d_weights,
        d_state,
        state,
        previous,
        gamma,
        hidden1,
        hidden2,
        logits,
        ids,
        w_norm,
        w1,
        w2,
        w_out,
        eps,
        unweighted,
        trained,
    ):
        (rows, width), classes, dtype = state.shape, len(w_out), state.dtype
        given = dict(
            d_weights=d_weights,
            d_state=d_state,
            state=state,
            previous=previous,
            gamma=gamma,
            hidden1=hidden1,
            hidden2=hidden2,
            logits=logits,
            ids=ids,
            w_norm=w_norm,
            w1=w1,
            w2=w2,
            w_out=w_out,
        )
        results = dict.fromkeys(CHAIN, ((rows, width), dtype)) | {
            "d_previous": ((rows if gamma is not None else 0, width), dtype),
            "d_logits": ((rows, router_columns(classes)), dtype),
            "sums": ((self.programs("backward", rows, width), 3, width), torch.float32),
        }
        flags = {"HAS_PREVIOUS": gamma is not None, "HAS_D_STATE": d_state is not None}
        found = self.run("backward", given, results, flags, w_out, rows, eps, unweighted)
        given = {name: found[name] for name in ("d_logits", "active2", "sums")} | {
            "d_hidden": torch.stack((found["d_hidden1"], found["d_hidden2"])),
            "inputs": torch.stack((found["normed"], found["active1"])),
        }
        shape = (self.programs("parameters", rows, width), 2 * width + classes + len(SUM_NAMES), width)
        slabs = self.run("parameters", given, {"slabs": (shape, torch.float32)}, {}, w_out, rows)["slabs"]
        return found["d_projected"], found["d_previous"], slabs.sum(0)
