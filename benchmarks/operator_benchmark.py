# SPDX-License-Identifier: Apache-2.0
"""Shared by the benchmarks of single operators: options, the copy bandwidth that rates are compared with, and the
final table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from call_timing import copy_bandwidth
from result_record import RESULTS, described, write

MI300X_BYTES_PER_S = 4.33e12  # rate of a copy on an MI300X; for predictions


def add_options(parser: argparse.ArgumentParser, name: str | None, *, sweep: bool = True) -> None:
    """Add the options that `begin` and `finish` read. sweep: whether the benchmark has a sweep."""
    parser.add_argument("--rep", type=int, default=200, help="milliseconds per measurement")
    if sweep:
        parser.add_argument("--sweep", action="store_true", help="measure launches of the Triton kernels instead")
    parser.add_argument("--name", default=name, help="name of the results file")
    parser.add_argument("--results", type=Path, default=RESULTS, help="its folder")
    parser.add_argument("--commit", help="commit that is measured, outside a git checkout")


def begin(options: argparse.Namespace) -> torch.device:
    """Return the device with seeded generators; options.copy becomes its copy bandwidth in bytes per second."""
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    options.copy = copy_bandwidth(device, options.rep)
    if device.type == "cuda":
        from torch._functorch import config as functorch

        functorch.donated_buffer = False  # a backward pass that is repeated keeps its inputs
    return device


def failure(error: Exception) -> dict:
    """Return the row of a call that cannot be measured: an anchor that is not installed, or a kernel that does not
    fit on this device.
    """
    return {"error": f"{type(error).__name__}: {error}"[:200]}


def lines(results: dict, widths: tuple[int, ...], before: str = "") -> Iterator[str]:
    """Return one line per row of figures: the names that lead to it, each as wide as `widths` says, and its cells."""
    for name, below in results.items():
        here = f"{before}{name:{widths[0]}}"
        if len(widths) > 1:
            yield from lines(below, widths[1:], here)
        else:
            yield here + (
                "  ".join(f"{key} {value}" for key, value in below.items()) if isinstance(below, dict) else str(below)
            )


def finish(options: argparse.Namespace, results: dict, widths: tuple[int, ...]) -> None:
    """Print the table on stderr, and write the record."""
    record = {**described(options.commit), "copy_tb_per_s": round(options.copy / 1e12, 3), "results": results}
    print(
        "\n".join(lines(results, widths)),
        f"\ncopy bandwidth {record['copy_tb_per_s']} TB/s on {record['device']}",
        file=sys.stderr,
    )
    write(record, options.name, options.results)
