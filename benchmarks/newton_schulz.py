# SPDX-License-Identifier: Apache-2.0
"""Compare implementations of Newton-Schulz on ZAYA1's matrices in one run on one GPU: time, and distance from fp64.

    python3 benchmarks/newton_schulz.py

Anchors: torch.optim.Muon's function in a loop, cuBLAS batched products, torch.compile of those, and where they can be
imported gram-newton-schulz with quack (CuTe-DSL) and dion's Triton kernels (newton_schulz_triton.py on PYTHONPATH;
minutes of autotuning: --dion). Inputs are random; calls take several different ones in turn. Prints a table and one
line of JSON and writes it to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from result_record import RESULTS, described, file_part, write

import hip_ops
from hip_ops.newton_schulz_form import default_restarts, multiply_adds
from hip_ops.ops.newton_schulz.plan import coefficient_triples

SHAPES = [
    (16, 2048, 4096),
    (16, 4096, 2048),
    (16, 2048, 2048),
    (1, 2048, 4096),
    (1, 1024, 2048),
    (1, 2048, 1024),
    (1, 256, 2048),
    (1, 128, 2048),
    (1, 256, 256),
    (1, 17, 256),
    (40, 1024, 2048),
    (120, 256, 256),
]
STEPS = 5
SIMPLE = coefficient_triples("simple", STEPS)
INPUTS = 4  # different inputs, taken in turn


def cublas(x: torch.Tensor) -> torch.Tensor:
    """Run the iteration in bf16 on cuBLAS, batched, as a user would write it."""
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp_min(1e-7)
    for a, b, c in SIMPLE:
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def torch_muon(x: torch.Tensor) -> list[torch.Tensor]:
    from torch.optim._muon import _zeropower_via_newtonschulz

    return [_zeropower_via_newtonschulz(matrix, SIMPLE[0], STEPS, 1e-7) for matrix in x]


def by_version(name: str) -> Callable:
    """Return a function that runs one version of ours; a shape that it does not take goes to the next version."""

    def run(x: torch.Tensor) -> torch.Tensor:
        with hip_ops.use_kernels("auto", newton_schulz=name):
            return hip_ops.newton_schulz(x, STEPS)

    return run


def quack() -> Callable:
    from gram_newton_schulz import GramNewtonSchulz

    return GramNewtonSchulz(ns_coefficients=[list(t) for t in SIMPLE], gram_newton_schulz_reset_iterations=[2])


def dion() -> Callable:
    from newton_schulz_triton import newton_schulz_triton

    return newton_schulz_triton


def contestants(options) -> dict[str, Callable[[], Callable]]:
    ours = {"hip_ops": {}, "hip_ops bf16": {"dtype": torch.bfloat16}}
    found = {name: (lambda kw=kw: lambda x: hip_ops.newton_schulz(x, STEPS, **kw)) for name, kw in ours.items()}
    found |= {f"hip_ops by {name}": (lambda name=name: by_version(name)) for name in ("triton", "quack")}
    found |= {
        "torch.optim.Muon": lambda: torch_muon,
        "cuBLAS bmm": lambda: cublas,
        "torch.compile(bmm)": lambda: torch.compile(cublas, dynamic=False),
    }
    found["gram-newton-schulz + quack"] = quack
    if options.dion:
        found["dion Triton"] = dion
    return {
        name: make for name, make in found.items() if options.only is None or any(part in name for part in options.only)
    }


def milliseconds(run: Callable, inputs: list[torch.Tensor], options) -> float:
    from triton.testing import do_bench

    turn = itertools.cycle(inputs)
    return do_bench(lambda: run(next(turn)), warmup=options.warmup, rep=options.rep, return_mode="median")


def error(result, x: torch.Tensor) -> float:
    """Return the distance from fp64 on the first matrix, relative to its norm."""
    exact = hip_ops.newton_schulz(x[:1].double(), STEPS)[0]
    return ((result[0].double() - exact).norm() / exact.norm()).item()


def measure(options) -> list[dict]:
    rows = []
    for batch, m, n in SHAPES:
        inputs = [torch.randn((batch, m, n), device="cuda", dtype=torch.bfloat16) for _ in range(INPUTS)]
        small, large = min(m, n), max(m, n)
        dense = batch * STEPS * (4 * large / small + 2) * small**3
        for name, make in contestants(options).items():
            try:
                run = make()
                run(inputs[0])
                off = error(run(inputs[0]), inputs[0])
                ms = milliseconds(run, inputs, options)
            except Exception as problem:  # an anchor that is not installed, or that has no variant for a shape
                print(
                    f"{batch}x({m}x{n}) {name}: {type(problem).__name__}: {str(problem)[:100]}",
                    file=sys.stderr,
                    flush=True,
                )
                continue
            rows.append(
                {
                    "shape": [batch, m, n],
                    "name": name,
                    "ms": round(ms, 4),
                    "dense_equivalent_tflops": round(dense / ms / 1e9, 1),
                    "error": float(f"{off:.3g}"),
                }
            )
            print(
                f"{batch:3}x({m}x{n})  {name:28} {ms:9.4f} ms  {dense / ms / 1e9:7.1f} TFLOP/s dense-equivalent  error "
                f"{off:.2e}",
                file=sys.stderr,
                flush=True,
            )
        del inputs
        torch.cuda.empty_cache()
    return rows


def predictions() -> list[dict]:
    """Predict the time of MFMA alone on an MI300X at 600 TFLOP/s; not measured."""
    found = []
    for batch, m, n in SHAPES:
        small, large = min(m, n), max(m, n)
        work = {
            form: 2 * batch * multiply_adds(form, small, large, STEPS, len(default_restarts(STEPS)))
            for form in ("standard", "gram")
        }
        found.append(
            {
                "shape": [batch, m, n],
                **{f"{form}_ms_at_600_tflops": round(flops / 600e9, 4) for form, flops in work.items()},
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=None, help="parts of the names of implementations to measure")
    parser.add_argument("--dion", action="store_true")
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--rep", type=int, default=200, help="milliseconds per figure")
    parser.add_argument("--commit", default=None, help="commit that is measured, outside a git checkout")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--name", default=None, help="name of the results file")
    options = parser.parse_args()
    rows = measure(options)
    record = {**described(options.commit), "results": rows, "mi300x_predictions": predictions()}
    write(record, options.name or f"newton_schulz-{file_part(record['device'])}", options.results)


if __name__ == "__main__":
    main()
