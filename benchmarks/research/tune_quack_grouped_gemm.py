# SPDX-License-Identifier: Apache-2.0
"""Measure other tiles of quack's grouped GEMM on this GPU, each checked against fp32, and hip_ops' Triton.

    python3 benchmarks/research/tune_quack_grouped_gemm.py                      16,384 tokens, two layers' loads, all of
                                                                                TILES and CLUSTERS; a minute
    python3 benchmarks/research/tune_quack_grouped_gemm.py --tokens 32768 --loads late

Products and loads are those of benchmarks/grouped_product.py; `write` is the weight gradient that is written, not
added. Triton's time is the better of two, before each product's tiles. Prints the best tiles of each form and of all,
over all loads; hip_ops/ops/grouped_product/quack.py has one of them as TILE. Writes benchmarks/results/<name>.json.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor

from hip_ops.ops.grouped_product import quack, triton
from hip_ops.runtime.quack_tiles import Tile, available

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # modules of benchmarks/
from call_timing import milliseconds  # noqa: E402
from grouped_product import LOADS, Products  # noqa: E402
from operator_benchmark import add_options, begin, failure, finish  # noqa: E402

# Those that quack's own tuner tries on Hopper: both ways of sharing a tile among warps.
TILES = (
    *((m, n, False) for m, n in ((256, 128), (256, 160), (256, 192), (256, 208), (128, 256), (128, 224))),
    *((m, n, True) for m, n in ((128, 128), (128, 160), (128, 192), (128, 208), (192, 128))),
)
CLUSTERS = ((2, 1), (1, 2), (1, 1))
FORMS = {
    "rows_t": ("forward fc1", "forward fc2"),
    "rows": ("dgrad fc1", "dgrad fc2"),
    "outer": ("wgrad fc1", "wgrad fc2"),
    "written": ("write fc1", "write fc2"),
}
WRONG = 4e-3  # relative to the norm, for results that are rounded to bf16


def operands(products: Products, name: str) -> tuple[Tensor, Tensor]:
    return {
        "forward fc1": (products.x, products.fc1.mT),
        "forward fc2": (products.inner, products.fc2.mT),
        "dgrad fc2": (products.grad_y, products.fc2),
        "dgrad fc1": (products.grad_gate_up, products.fc1),
    }.get(name) or ((products.grad_y, products.inner) if name.endswith("fc2") else (products.grad_gate_up, products.x))


def call(products: Products, name: str, version):
    """Return a call of one product. version: of hip_ops.grouped_product, as a module."""
    a, b = operands(products, name)
    if name.split()[0] in ("forward", "dgrad"):
        return lambda: version.grouped_rows(a, b, products.offsets)
    total, accumulate = products.main1 if name.endswith("fc1") else products.main2, name.startswith("wgrad")
    return lambda: version.grouped_outer_(total, a, b, products.offsets, accumulate)


def exact(products: Products, name: str) -> Tensor:
    """Return the product in fp32, expert by expert."""
    a, b = operands(products, name)
    ends = products.offsets.tolist()
    pairs = enumerate(zip([0, *ends[:-1]], ends, strict=True))
    if name.split()[0] in ("forward", "dgrad"):
        return torch.cat([a[start:end].float() @ b[expert].float() for expert, (start, end) in pairs])
    return torch.stack([a[start:end].float().T @ b[start:end].float() for _, (start, end) in pairs])


def result(products: Products, name: str, run) -> Tensor:
    """Return the result of one call; it adds to zeros, and overwrites NaN."""
    total = products.main1 if name.endswith("fc1") else products.main2
    total.fill_(0.0 if name.startswith("wgrad") else float("nan"))
    found = run()
    return total if found is None else found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, "quack_tiles", sweep=False)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=["late", "early"])
    parser.set_defaults(rep=60)
    options = parser.parse_args()
    device = begin(options)
    if reason := available(device):
        parser.error(reason)
    tiles = {
        f"{m} x {n}{' pingpong' if pingpong else ''}, {c} x {d}": Tile(m, n, pingpong, c, d)
        for (m, n, pingpong), (c, d) in itertools.product(TILES, CLUSTERS)
    }
    results: dict[str, dict] = {}
    for load in options.loads:
        products = Products(options.tokens, 2048, 2048, load, device)
        for names in FORMS.values():
            for name in names:
                rows, wanted = results.setdefault(f"{load} {name}", {}), exact(products, name)
                rows["triton"] = {
                    "ms": round(
                        min(milliseconds(call(products, name, triton), device, options.rep) for _ in range(2)), 4
                    )
                }
                for title, tile in tiles.items():
                    with mock.patch.object(quack, "TILE", tile):
                        try:
                            run = call(products, name, quack)
                            distance = ((result(products, name, run).float() - wanted).norm() / wanted.norm()).item()
                            rows[title] = {
                                "ms": round(milliseconds(run, device, options.rep), 4),
                                "distance": float(f"{distance:.2g}"),
                            }
                        except Exception as error:  # this release has no kernel for the tile
                            rows[title] = failure(error)
                del wanted
    for form, names in (*FORMS.items(), ("all", tuple(itertools.chain(*FORMS.values())))):
        sums = {}
        for title in ("triton", *tiles):
            found = [results[f"{load} {name}"][title] for load in options.loads for name in names]
            if all("ms" in each and each.get("distance", 0.0) <= WRONG for each in found):
                sums[title] = sum(each["ms"] for each in found)
        best = (*sorted(sums, key=sums.get)[:4], "triton")
        print(form, *(f"{title}: {sums[title]:.3f} ms" for title in best), sep="; ", file=sys.stderr)
    finish(options, results, (20, 28))


if __name__ == "__main__":
    main()
