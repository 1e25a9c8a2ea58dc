# SPDX-License-Identifier: Apache-2.0
"""Measure Triton configurations of Newton-Schulz's products on this GPU and write the table of configurations.

    python3 benchmarks/research/tune_symmetric_product.py --write     # about 5 minutes on an H100; without --write it
                                                                      # only prints

Each candidate is checked against cuBLAS before it is timed, in CUDA graphs, so that launches do not count. The best few
of the products that keep a GPU at its power limit are timed again for longer, in turn, on a hot GPU: there
configurations that need less power per operation win. The winner of every kind and shape goes to
hip_ops/ops/newton_schulz/product_configs.json (or --output), with device, date and commit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import time
from itertools import product as combinations
from pathlib import Path

import torch
from triton.testing import do_bench_cudagraph

from hip_ops.ops.newton_schulz.product_configs import TABLE, ProductConfig, read_table
from hip_ops.ops.newton_schulz.triton import product

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules of benchmarks/
from compile_ahead import compile_ahead  # noqa: E402
from result_record import commit_of  # noqa: E402
from tuning_tables import SHARED_MEMORY, shared_memory, write_products  # noqa: E402

SHAPES = [
    (16, 2048, 4096),
    (16, 2048, 2048),
    (1, 2048, 4096),
    (1, 2048, 2048),
    (1, 1024, 2048),
    (4, 1024, 2048),
    (16, 256, 2048),
    (1, 256, 2048),
    (1, 256, 256),
]
HOT = 16 * 2048**3  # multiply-adds from which a product is timed on a hot device
TILES = [  # block_m, block_n, block_k, parts, num_warps, stages
    (128, 256, 64, 2, 8, (3, 4)),
    (256, 128, 64, 2, 8, (3,)),
    (128, 128, 64, 1, 8, (3, 4, 5)),
    (128, 128, 64, 1, 4, (3, 4)),
    (128, 128, 128, 1, 8, (2,)),
    (64, 128, 64, 1, 4, (4, 5)),
    (64, 128, 128, 1, 4, (3,)),
    (64, 64, 64, 1, 4, (4, 6)),
    (64, 64, 128, 1, 4, (3, 4)),
    (64, 256, 64, 2, 4, (3, 4)),
]


def candidates(kind: str, n: int) -> list[ProductConfig]:
    found = [ProductConfig(engine="cublas")]
    for block_m, block_n, block_k, parts, warps, stages in TILES:
        if block_m > max(64, n) or block_n > max(64, n) or (kind != "update" and block_n > 2 * block_m):
            continue
        if n >= 1024 and block_m * block_n < 64 * 128:
            continue  # too little arithmetic per byte
        for depth, (persistent, flatten, specialize) in combinations(
            stages, ((True, True, False), (False, False, False), (True, False, True))
        ):
            config = ProductConfig(
                "triton", block_m, block_n, block_k, parts, warps, depth, persistent, flatten, specialize
            )
            if shared_memory(config) <= SHARED_MEMORY["sm_90"] and not (specialize and block_m * block_n < 128 * 128):
                found.append(config)
    return found


def call(kind: str, config: ProductConfig, x: torch.Tensor, z: torch.Tensor, c: torch.Tensor):
    """Return a call of one product of the iteration: X X^T, b R + c R^2, or a X + Z X."""
    if kind == "gram":
        left, right, d, symmetric = x, x, None, True
    elif kind == "square":
        left, right, d, symmetric = z, z, z, True
    else:
        left, right, d, symmetric = z, x.mT, x, False
    beta = 0.0 if d is None else 0.5
    if config.engine == "cublas":
        return lambda: torch.baddbmm(c if d is None else d, left, right.mT, beta=beta, alpha=0.25, out=c)
    return lambda: product(left, right, d, c, 0.25, beta, symmetric, config)


def run_once(kind: str, batch: int, n: int, config: ProductConfig) -> None:
    """Compile one candidate. Triton's code does not depend on sizes that are divisible by 16, but on whether there
    is one matrix.
    """
    x, z = (torch.randn((batch, n, columns), device="cuda", dtype=torch.float16) for columns in (2 * n, n))
    call(kind, config, x, z, torch.empty_like(x if kind == "update" else z))()
    torch.cuda.synchronize()


def measure(kind: str, batch: int, n: int, m: int, rep: int, deadline: float) -> list[tuple[float, ProductConfig]]:
    """Return milliseconds and configurations, best first."""
    x = torch.randn((batch, n, m), device="cuda", dtype=torch.float16) / m**0.25
    z = torch.randn((batch, n, n), device="cuda", dtype=torch.float16) / n**0.25
    z = (z + z.mT).contiguous()
    c = torch.empty_like(x if kind == "update" else z)
    want = call(kind, ProductConfig(engine="cublas"), x, z, torch.empty_like(c))().clone()
    results = []
    for config in candidates(kind, n):
        if time.monotonic() > deadline:
            print("out of time: the remaining shapes are not measured", flush=True)
            break
        try:
            run = call(kind, config, x, z, c.fill_(float("nan")))
            run()
            worst = ((c - want).abs().max() / want.abs().max()).item()
            if not worst <= 2**-9:
                print(f"WRONG by {worst:.3g} of the largest: {kind} {batch}x{n}x{m} {config}", flush=True)
                continue
            results.append((do_bench_cudagraph(run, rep=rep, return_mode="median"), config))
        except Exception as error:  # a configuration that this Triton cannot compile, or that does not fit
            print(
                f"not possible: {kind} {config}: {type(error).__name__}: "
                f"{str(error).splitlines()[0][:120] if str(error) else ''}",
                flush=True,
            )
    results.sort(key=lambda row: row[0])
    if batch * n * n * m < HOT:
        return results
    wide = ProductConfig(block_n=256, parts=2)  # the largest tile: least shared memory traffic per multiply-add
    finalists = list(dict.fromkeys([*(config for _, config in results[:5]), wide]))
    calls = [call(kind, config, x, z, c) for config in finalists]
    times = [[do_bench_cudagraph(run, rep=10 * rep, return_mode="median") for run in calls] for _ in range(4)][1:]
    return sorted(
        zip((min(column) for column in zip(*times, strict=True)), finalists, strict=True), key=lambda row: row[0]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--output", type=Path, default=TABLE)
    parser.add_argument("--rep", type=int, default=20, help="milliseconds per candidate")
    parser.add_argument(
        "--seconds", type=int, default=450, help="time limit; shapes are measured in order of importance"
    )
    parser.add_argument(
        "--only", nargs="+", default=None, help="shapes to measure, as 16x2048x4096; the other rows of the table stay"
    )
    parser.add_argument("--commit", default=None)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    shapes = [s for s in SHAPES if options.only is None or "x".join(map(str, s)) in options.only]
    ahead = {
        (kind, min(batch, 2), min(n, 1024), config)
        for batch, n, _ in shapes
        for kind in ("square", "gram", "update")
        for config in candidates(kind, n)
        if config.engine == "triton"
    }
    compile_ahead(run_once, sorted(ahead, key=str))
    print(f"compiled {len(ahead)} candidates, {deadline - time.monotonic():.0f} s left", flush=True)
    rows, everything = [], []
    for batch, n, m in shapes:
        for kind in ("square", "gram", "update"):
            if (
                kind == "square" and any(r["kind"] == "square" and (r["batch"], r["n"]) == (batch, n) for r in rows)
            ) or time.monotonic() > deadline:
                continue
            ranked = measure(kind, batch, n, m, options.rep, deadline)
            if not ranked:
                continue
            (ms, best), *others = ranked
            # symmetric products at half
            flops = batch * n * (n * (n if kind == "square" else m)) * (2 if kind == "update" else 1)
            dense = next((t for t, config in ranked if config.engine == "cublas"), None)
            print(
                f"{kind:7}{batch:3}x({n}x{m})  {ms:.4f} ms {flops / ms / 1e9:.0f} TFLOP/s  cuBLAS {dense}  {best}",
                flush=True,
            )
            for t, config in others[:3]:
                print(f"        {t:.4f} {config}", flush=True)
            rows.append(
                {
                    "kind": kind,
                    "batch": batch,
                    "n": n,
                    "m": n if kind == "square" else m,
                    "config": best,
                    "ms": round(ms, 5),
                }
            )
            everything.append(
                {
                    "kind": kind,
                    "batch": batch,
                    "n": n,
                    "m": m,
                    "ranked": [[round(t, 5), str(config)] for t, config in ranked],
                }
            )
    measured_on = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today().isoformat()}, commit "
        f"{commit_of(options.commit)}: "
        + shlex.join(["python3", "benchmarks/research/tune_symmetric_product.py", *sys.argv[1:]])
    )
    if options.only is not None:
        of = {(row["kind"], row["batch"], row["n"], row["m"]) for row in rows}
        before, kept = read_table()
        rows += [row for row in kept if (row["kind"], row["batch"], row["n"], row["m"]) not in of]
        measured_on = f"{measured_on}; the rest: {before}"
    kinds = {row["kind"] for row in rows}
    if options.write and kinds == {"gram", "square", "update"}:
        write_products(rows, measured_on, options.output)
        print(f"wrote {options.output}")
    print(json.dumps({"measured_on": measured_on, "results": everything}))


if __name__ == "__main__":
    main()
