# SPDX-License-Identifier: Apache-2.0
"""Prints what the compilers make of the matrix products for MI300X: registers, issue slots and LDS time of the inner
loops. No device is needed, and nothing is measured on one.

    python benchmarks/research/compiled_for_mi300x.py                    the pinned Triton and clang 19
    PYTHONPATH=FOLDER:. python benchmarks/research/compiled_for_mi300x.py     another Triton, installed into FOLDER

Other slots: issue slots of a wave's inner loop that are no MFMA, for 256 MFMA passes. LDS: time of the loop's LDS
accesses with their bank conflicts, by the emulator's counters, relative to the time of its MFMAs. Triton compiles a
launch for its tensors: "small" is code for tensors below 2 GiB, which are accessed by buffer instructions; in the other
code matrices and main gradients are larger, as views of Megatron's buffers are. Prints a table and a JSON record.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # hip_ops and tests, where neither is installed

import triton

from hip_ops.ops.grouped_product.configs import DERIVED, GroupedConfig
from hip_ops.ops.newton_schulz.plan import TILE_SIDES
from tests.gfx942.budgets import resources
from tests.gfx942.inner_loop import inner_loop
from tests.gfx942.toolchain import code_object
from tests.gfx942.triton_cases import grouped_product
from tests.hip_ops.grouped_device import lds_time
from tests.hip_ops.product_device import product_lds_time

COLUMNS = (
    "kernel", "tile", "waves", "vgprs", "agprs", "spills", "lds_bytes", "waves_per_simd", "other_slots", "lds_time",
)  # fmt: skip


def row(name: str, tile: str, path, kernel: str, shared: int, threads: int, lds: float) -> dict:
    found, loop = resources(path, kernel, shared, threads), inner_loop(path, kernel)
    slots = round(loop.other_slots * 256 / loop.mfma_passes, 1)
    values = (
        name, tile, threads // 64, found.vgprs, found.agprs, found.vgpr_spills, found.lds, found.waves_per_simd, slots,
        round(lds, 3),
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def grouped_row(kind: str, config: GroupedConfig, small: bool) -> dict:
    compiled = grouped_product(kind, config, small)
    tile = f"{config.block_m} x {config.block_n} x {config.block_k}"
    return row(
        f"grouped {kind}{', small' * small}",
        tile,
        compiled.path,
        compiled.name,
        compiled.shared,
        compiled.threads,
        lds_time(kind, config),
    )


def product_rows() -> list[dict]:
    """Of the HIP products, in bf16."""
    path = code_object("symmetric_product")
    return [
        row(
            f"{family} product",
            f"{side} x {side} x 32",
            path,
            f"ho_{family}_bf16_{side}",
            0,
            512 if side == 256 else 256,
            product_lds_time(side),
        )  # fmt: skip
        for family in ("symmetric", "general")
        for side in TILE_SIDES["gfx942"]
    ]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [
        grouped_row(kind, candidate.config, small)
        for kind, candidates in DERIVED.items()
        for candidate in candidates
        for small in (False, True)
    ]
    rows += product_rows()
    print(f"Triton {triton.__version__}\n\n| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for each in rows:
        print(f"| {' | '.join(str(each[column]) for column in COLUMNS)} |")
    print(json.dumps({"triton": triton.__version__, "rows": rows}))


if __name__ == "__main__":
    main()
