# SPDX-License-Identifier: Apache-2.0
"""Measure Triton configurations of the experts' grouped products on this GPU and write its part of the table of
configurations.

    python3 benchmarks/research/tune_grouped_product.py --write     # 2 to 3 minutes on an H100; without --write it only
                                                                    # prints
    python3 benchmarks/research/tune_grouped_product.py --write --only outer:16384      # weight gradients at 16,384
                                                                    # tokens; the table's other rows stay

Each candidate is checked against torch before it is timed. The best few of each shape are timed again in turn on a hot
GPU, where configurations that need less power per operation win. The winners go to
hip_ops/ops/grouped_product/grouped_configs.json (or --output), with device, date and commit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from triton.testing import do_bench

from hip_ops.ops.grouped_product import reference
from hip_ops.ops.grouped_product.configs import DERIVED, KINDS, TABLE, GroupedConfig, read_table
from hip_ops.ops.grouped_product.triton import grouped_outer_, grouped_rows
from hip_ops.runtime.launch import architecture

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules of benchmarks/
from compile_ahead import compile_ahead  # noqa: E402
from grouped_product import LOADS, offsets_of  # noqa: E402
from result_record import commit_of  # noqa: E402
from tuning_tables import SHARED_MEMORY, shared_memory, write_grouped  # noqa: E402

# kind, tokens, k, n: the experts' six products at 32,768 and 16,384 tokens, in order of importance
SHAPES = [
    (kind, tokens, k, n)
    for tokens in (32768, 16384)
    for kind, k, n in (
        ("outer", 4096, 2048),
        ("rows_t", 2048, 4096),
        ("rows", 4096, 2048),
        ("outer", 2048, 2048),
        ("rows_t", 2048, 2048),
        ("rows", 2048, 2048),
    )
]
NAMES = tuple(dict.fromkeys(f"{kind}:{tokens}" for kind, tokens, *_ in SHAPES))
EXPERTS = len(LOADS["late"])


def updated(before: list[dict], rows: list[dict]) -> list[dict]:
    """Return `before` with `rows` in the places of those of the same kind, rows, k and n; new rows come last."""
    key = lambda row: tuple(row[name] for name in ("kind", "rows", "k", "n"))  # noqa: E731
    return list(({key(row): row for row in before} | {key(row): row for row in rows}).values())


def candidates(kind: str, arch: str) -> list[GroupedConfig]:
    """Return tiles with one and with two blocks per multiprocessor; on AMD with pointers only."""
    if arch.startswith("gfx"):
        base = GroupedConfig(block_n=128, num_warps=4, num_stages=2, flatten=False, descriptors=False)
        tiles = [
            *(replace(each.config, kpack=each.config.kpack if arch == "gfx942" else 1) for each in DERIVED[kind]),
            base,
            replace(base, block_k=32),
            replace(base, block_n=256, num_warps=8, block_k=32),
            replace(base, block_m=256, num_warps=8, block_k=32),
        ]
        return [replace(tile, programs=programs) for tile in tiles for programs in (0, 1, 2)]
    parts = (2, 4) if kind == "outer" else (1, 2)
    found = [
        GroupedConfig(m, n, k, warps, stages, part, group, programs, flatten, reduce=reduce)
        for m, n, k, warps, programs in (
            (128, 256, 64, 8, 1),
            (256, 128, 64, 8, 1),
            (128, 128, 64, 4, 2),
            (128, 128, 64, 8, 1),
            (128, 256, 128, 8, 1),
        )
        for stages in (2, 3, 4)
        for part in parts
        for group in (8, 16)
        for flatten in ((True,) if kind == "outer" else (True, False))
        for reduce in ((True, False) if kind == "outer" else (True,))
    ]
    size = 4 if kind == "outer" else 2
    # Some settings matter little and are tried on the plain candidate only.
    plain = lambda c: (c.block_m, c.block_n, c.block_k, c.num_stages) == (128, 256, 64, 3)  # noqa: E731
    return [
        c
        for c in found
        if c.programs * (shared_memory(c, size) + 1024) <= SHARED_MEMORY["sm_90"]
        and (c.num_stages > 2 or c.block_k == 128)
        and ((c.group == 8 and c.flatten and c.reduce) or plain(c))
        and (c.programs == 1 or c.flatten)
    ]


def operands(kind: str, tokens: int, k: int, n: int, load: str) -> tuple:
    offsets = offsets_of(load, tokens, "cuda")
    experts = len(offsets)
    x = torch.randn(tokens, k, device="cuda").bfloat16()
    if kind == "outer":
        return torch.zeros(experts, k, n, device="cuda"), x, torch.randn(tokens, n, device="cuda").bfloat16(), offsets
    stored = torch.randn(experts, *((n, k) if kind == "rows_t" else (k, n)), device="cuda").bfloat16() / k**0.5
    return x, stored.mT if kind == "rows_t" else stored, offsets


def call(kind: str, arguments: tuple, config: GroupedConfig):
    if kind == "outer":
        return lambda: grouped_outer_(*arguments, True, config)
    return lambda: grouped_rows(*arguments, config)


def run_once(kind: str, config: GroupedConfig) -> None:
    call(kind, operands(kind, 512, 512, 512, "late"), config)()
    torch.cuda.synchronize()


def wrong_by(kind: str, config: GroupedConfig) -> float:
    """Return the largest error relative to the largest result, on a small problem with an uneven load."""
    arguments = operands(kind, 1531, 512, 768, "early")
    if kind == "outer":
        total, *rest = arguments
        want = torch.zeros_like(total)
        reference.grouped_outer_(want, *rest, True)
        call(kind, arguments, config)()
        return ((total - want).abs().max() / want.abs().max()).item()
    want = reference.grouped_rows(*arguments).float()
    return ((call(kind, arguments, config)().float() - want).abs().nan_to_num(1e9).max() / want.abs().max()).item()


def measure(
    kind: str, tokens: int, k: int, n: int, tried: list[GroupedConfig], rep: int, deadline: float
) -> list[tuple[float, GroupedConfig]]:
    """Return milliseconds and configurations, best first; the first four were timed on a hot device."""
    arguments, results = operands(kind, tokens, k, n, "late"), []
    for config in tried:
        if time.monotonic() > deadline:
            break
        try:
            results.append((do_bench(call(kind, arguments, config), warmup=5, rep=rep, return_mode="median"), config))
        except Exception as error:  # a configuration that this Triton cannot compile, or that does not fit
            print(
                f"not possible: {kind} {config}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}",
                flush=True,
            )
    results.sort(key=lambda row: row[0])
    finalists = [config for _, config in results[:4]]
    if not finalists:
        return results
    times = [
        [do_bench(call(kind, arguments, config), warmup=5, rep=5 * rep, return_mode="median") for config in finalists]
        for _ in range(4)
    ][1:]
    hot = sorted(
        zip((min(column) for column in zip(*times, strict=True)), finalists, strict=True), key=lambda row: row[0]
    )
    return hot + results[4:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--output", type=Path, default=TABLE)
    parser.add_argument("--rep", type=int, default=15, help="milliseconds per candidate")
    parser.add_argument(
        "--seconds", type=int, default=240, help="time limit; shapes are measured in order of importance"
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=NAMES,
        metavar="KIND:TOKENS",
        help=f"shapes to measure, of {', '.join(NAMES)}; the table's other rows stay",
    )
    parser.add_argument("--commit", default=None)
    options = parser.parse_args()
    shapes = [shape for shape in SHAPES if options.only is None or f"{shape[0]}:{shape[1]}" in options.only]
    torch.manual_seed(0)
    deadline, arch = time.monotonic() + options.seconds, architecture(torch.device("cuda", 0))
    ahead = [
        (kind, config) for kind in dict.fromkeys(shape[0] for shape in shapes) for config in candidates(kind, arch)
    ]
    compile_ahead(run_once, ahead)
    print(f"compiled {len(ahead)} candidates, {deadline - time.monotonic():.0f} s left", flush=True)
    right: dict[str, list[GroupedConfig]] = {}
    for kind, config in ahead:
        try:
            worst = wrong_by(kind, config)
        except Exception as error:
            print(
                f"not possible: {kind} {config}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:120]}",
                flush=True,
            )
            continue
        if worst <= (1e-5 if kind == "outer" else 2**-7):
            right.setdefault(kind, []).append(config)
        else:
            print(f"WRONG by {worst:.3g} of the largest: {kind} {config}", flush=True)
    rows, everything = [], []
    for kind, tokens, k, n in shapes:
        if time.monotonic() > deadline:
            print(f"out of time before {kind} {tokens} {k} {n}", flush=True)
            break
        ranked = measure(kind, tokens, k, n, right.get(kind, []), options.rep, deadline)
        if not ranked:
            continue
        ms, best = ranked[0]
        print(
            f"{kind:7}{tokens:6} {k}x{n}  {ms:.4f} ms {2 * tokens * k * n / ms / 1e9:.0f} TFLOP/s  {best}", flush=True
        )
        rows.append({"kind": kind, "rows": tokens // EXPERTS, "k": k, "n": n, "config": best, "ms": round(ms, 5)})
        everything.append(
            {**rows[-1], "config": str(best), "ranked": [[round(t, 5), str(config)] for t, config in ranked]}
        )
    measured_on = (
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {datetime.date.today().isoformat()}, commit "
        f"{commit_of(options.commit)}: "
        + shlex.join(["python3", "benchmarks/research/tune_grouped_product.py", *sys.argv[1:]])
    )
    if options.only is not None and rows:
        part = read_table(options.output if options.output.exists() else TABLE).get(
            arch, {"rows": [], "measured_on": "nothing"}
        )
        rows, measured_on = updated(part["rows"], rows), f"{measured_on}; the rest: {part['measured_on']}"
    if options.write and {row["kind"] for row in rows} == set(KINDS):
        write_grouped(arch, rows, measured_on, options.output)
        print(f"wrote {options.output}")
    elif options.write:
        missing = sorted(set(KINDS) - {row["kind"] for row in rows})
        print(
            f"nothing is written: a table of {arch} needs a row of each kind, and there is none of "
            f"{', '.join(missing)}; tune them too"
        )
    print(json.dumps({"measured_on": measured_on, "results": everything}))


if __name__ == "__main__":
    main()
