# SPDX-License-Identifier: Apache-2.0
"""Measure residual merge + RMSNorm, forward and backward, compared with eager torch, torch.compile, Liger and quack on
the same inputs.

    python3 benchmarks/rms_norm.py                     add + RMSNorm in bf16, and ZAYA's merge on an fp32 stream
    python3 benchmarks/rms_norm.py --sweep             other tiles and grids of the Triton kernels

Medians of triton's do_bench (which clears L2 before each call) on new random inputs larger than L2; the copy bandwidth
of the device is measured in the same run. Rates count the bytes that must move: each [rows, hidden] tensor once,
vectors not at all. `operator` includes dispatch and autograd, `kernel` is the version's function alone. Liger and quack
are measured where they can be imported. Prints a table, and one line of JSON, which it writes to
benchmarks/results/<name>.json.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from unittest import mock

import torch
import torch.nn.functional as F
from call_timing import milliseconds
from compile_ahead import compile_ahead
from operator_benchmark import MI300X_BYTES_PER_S, add_options, begin, failure, finish
from torch import Tensor

import hip_ops

BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-5


def eager_add(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    new_residual = x + residual
    return F.rms_norm(new_residual, weight.shape, weight, EPS), new_residual


def eager_scaled(output, residual, b_o, s_o, b_x, s_x, weight) -> tuple[Tensor, Tensor]:
    """Compute the formula of hip_ops.scaled_residual_rms_norm, as a user of torch writes it."""
    b_o, s_o, b_x, s_x = (v.float() for v in (b_o, s_o, b_x, s_x))
    new_residual = torch.addcmul(torch.addcmul(b_o * s_o + b_x * s_x, output.float(), s_o), residual, s_x)
    return F.rms_norm(new_residual, weight.shape, weight.float(), EPS).to(weight.dtype), new_residual


def liger_add(x: Tensor, residual: Tensor, weight: Tensor):
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    return liger_fused_add_rms_norm(x, residual, weight, EPS)


def quack_add(x: Tensor, residual: Tensor, weight: Tensor):
    from quack import rmsnorm

    return rmsnorm(x, weight, residual=residual, eps=EPS, prenorm=True)


@dataclass(frozen=True)
class Work:
    """Bytes per element that must move. Forward: x, residual in, y, new_residual out. Backward: dy, d_new_residual
    and the saved tensors in, d_x out, and d_residual where it differs from d_x.
    """

    name: str
    scaled: bool
    residual: torch.dtype
    forward_bytes: int
    backward_bytes: int
    eager: Callable
    anchors: dict[str, Callable]


ADD = Work("add + RMSNorm, bf16", False, BF16, 8, 8, eager_add, {"liger": liger_add, "quack": quack_add})
SCALED = Work("ZAYA merge + RMSNorm, fp32 stream", True, FP32, 12, 18, eager_scaled, {})


class Inputs:
    def __init__(self, work: Work, rows: int, hidden: int, device: torch.device):
        def stream(dtype):
            return torch.randn(rows, hidden, device=device, dtype=FP32).to(dtype)

        self.elements = rows * hidden
        self.x, self.residual = stream(BF16), stream(work.residual)
        self.vectors = [
            (torch.randn(hidden, device=device) * 0.1 + scale).to(BF16)
            for scale in ((0, 1, 0, 1, 1) if work.scaled else (1,))
        ]
        self.dy, self.d_new_residual = stream(BF16), stream(work.residual)

    @property
    def arguments(self) -> list[Tensor]:
        return [self.x, self.residual, *self.vectors]

    def backward(self, function: Callable) -> Callable:
        """Return a function that computes the gradients of all arguments from both results by autograd."""
        leaves = [t.detach().requires_grad_() for t in self.arguments]
        outputs = function(*leaves)
        return lambda: torch.autograd.grad(outputs, leaves, (self.dy, self.d_new_residual), retain_graph=True)


def ours(work: Work) -> Callable:
    function = hip_ops.scaled_residual_rms_norm if work.scaled else hip_ops.add_rms_norm
    return lambda *arguments: function(*arguments, EPS)


def kernels(work: Work, name: str, inputs: Inputs) -> tuple[Callable, Callable]:
    """Return forward and backward of version `name`, without dispatch and autograd."""
    module = importlib.import_module(f"hip_ops.ops.rms_norm.{name}")
    i, vectors = inputs, inputs.vectors if work.scaled else (*[None] * 4, *inputs.vectors)
    forward = lambda: module.merge_norm(i.x, i.residual, *vectors, None, EPS)  # noqa: E731
    _, new_residual, _, rstd = forward()
    rows = (i.x, i.residual) if work.scaled else (None, new_residual)
    return forward, lambda: module.merge_norm_backward(i.dy, i.d_new_residual, *rows, None, rstd, *vectors, BF16)


def measure(work: Work, rows: int, hidden: int, device: torch.device, options) -> dict:
    """Return {"forward": {name: figures}, "backward": ...}; a version that fails has its error instead of figures."""
    inputs, copy = Inputs(work, rows, hidden, device), options.copy
    needed = {"forward": work.forward_bytes * inputs.elements, "backward": work.backward_bytes * inputs.elements}
    found: dict[str, dict] = {"forward": {}, "backward": {}}

    def enter(direction: str, name: str, make_call: Callable[[], Callable]) -> None:
        try:
            ms = milliseconds(make_call(), device, options.rep)
        # an anchor that is not installed or does not run on this device becomes a row of the table
        except Exception as error:
            found[direction][name] = failure(error)
            return
        rate = needed[direction] / ms * 1e3
        found[direction][name] = {
            "ms": round(ms, 4),
            "tb_per_s": round(rate / 1e12, 3),
            "of_copy": round(rate / copy, 3),
        }

    def both(name: str, function: Callable) -> None:
        enter("forward", name, lambda: lambda: function(*inputs.arguments))
        enter("backward", name, lambda: inputs.backward(function))

    both("eager", work.eager)
    if device.type == "cuda":
        torch._dynamo.reset()
        both("torch.compile", torch.compile(work.eager, dynamic=False))
        for name, function in work.anchors.items():
            both(name, function)
    for name in options.versions:
        with hip_ops.use_kernels(name):
            both(f"{name}, operator", ours(work))
        if name in ("hip", "triton"):
            for direction, place in (("forward", 0), ("backward", 1)):
                enter(direction, f"{name}, kernel", lambda name=name, place=place: kernels(work, name, inputs)[place])
    best, summary = options.versions[0], {}
    for direction, figures in found.items():
        mine, compiled = (figures.get(name, {}).get("ms") for name in (f"{best}, operator", "torch.compile"))
        if mine and compiled:
            summary[f"torch.compile / ours, {direction}"] = round(compiled / mine, 3)
        summary[f"mi300x prediction ms, {direction}"] = round(1e3 * needed[direction] / MI300X_BYTES_PER_S, 4)
    return {**found, "summary": summary}


@contextlib.contextmanager
def launched_as(trial, backward: bool):
    """Replace tile and grid of the Triton kernels of one direction by `trial`."""
    from hip_ops.ops.rms_norm import triton as triton_kernels

    chosen = triton_kernels.launch

    def launch(hidden_size, *, place=backward, **options):
        return trial if options["backward"] == place else chosen(hidden_size, **options)

    with mock.patch.object(triton_kernels, "launch", launch):
        yield


def trials(work: Work, hidden: int, backward: bool) -> list:
    """Return other tiles, warps, grids and stages than `launch` chooses."""
    from hip_ops.ops.rms_norm.triton import launch
    from hip_ops.runtime.launch import WARP_SIZE

    default = launch(hidden, scaled=work.scaled, backward=backward, warp_size=WARP_SIZE)
    grids = (1, 2, 3, 4, 6, 8) if backward else (None, 2, 4, 8)
    return [
        replace(default, rows=rows, num_warps=warps, programs=grid, stages=stages)
        for rows, warps, grid, stages in itertools.product((1, 2), (4, 8, 16), grids, (1, 2, 3) if backward else (1, 2))
        if not (grid is None and stages > 1) and not (backward and rows > 1)
    ]


def run_once(name: str, hidden: int, trial, backward: bool) -> None:
    """Compiles one trial."""
    work = next(w for w in (ADD, SCALED) if w.name == name)
    with launched_as(trial, backward):
        kernels(work, "triton", Inputs(work, 256, hidden, torch.device("cuda", 0)))[backward]()


def sweep(work: Work, rows: int, hidden: int, device: torch.device, options) -> dict:
    """Return the times of the Triton kernels alone, best first."""
    inputs, found = Inputs(work, rows, hidden, device), {"forward": {}, "backward": {}}
    compile_ahead(
        run_once, [(work.name, hidden, trial, back) for back in (False, True) for trial in trials(work, hidden, back)]
    )
    for direction, backward in (("forward", False), ("backward", True)):
        for trial in trials(work, hidden, backward):
            with launched_as(trial, backward):
                try:
                    ms = milliseconds(kernels(work, "triton", inputs)[backward], device, options.rep)
                except Exception as error:  # too much shared memory, for example
                    found[direction][str(trial)] = failure(error)
                    continue
            needed = (work.backward_bytes if backward else work.forward_bytes) * inputs.elements
            found[direction][str(trial)] = {"ms": round(ms, 4), "tb_per_s": round(needed / ms / 1e9, 3)}
        found[direction] = dict(sorted(found[direction].items(), key=lambda item: item[1].get("ms", 1e9)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    on_gpu = torch.cuda.is_available()
    parser.add_argument(
        "--shapes",
        nargs="+",
        default=["32768x2048", "32768x4096"] if on_gpu else ["256x2048"],
        help="rows x hidden size",
    )
    parser.add_argument(
        "--versions",
        nargs="+",
        default=["triton", "hip"] if on_gpu else ["reference"],
        help="versions of the operator; the first one is compared with torch.compile",
    )
    add_options(parser, "rms_norm")
    options = parser.parse_args()
    device = begin(options)
    results = {}
    for work, shape in itertools.product((ADD, SCALED), options.shapes):
        rows, hidden = map(int, shape.split("x"))
        results[f"{work.name} {shape}"] = (sweep if options.sweep else measure)(work, rows, hidden, device, options)
    finish(options, results, (52, 10, 42))


if __name__ == "__main__":
    main()
