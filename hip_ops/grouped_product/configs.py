# SPDX-License-Identifier: Apache-2.0
"""Chooses tiles and pipelines of Triton's grouped products: the nearest row of grouped_configs.json of the same device
and kind.

Kinds: "rows_t" (x W_e^T, W_e stored [n, k]), "rows" (x W_e, W_e stored [k, n]), "outer" (a_e^T b_e).
benchmarks/research/tune_grouped_product.py measures the candidates on one device and writes its part of the file;
"measured_on" names the device, or says that the rows were derived.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path

from hip_ops.runtime import config_rows

TABLE = Path(__file__).with_name("grouped_configs.json")
KINDS = ("rows_t", "rows", "outer")
SHARED_MEMORY = {"sm_90": 232448, "gfx942": 65536}  # maximum bytes of a block


@dataclass(frozen=True)
class GroupedConfig:
    """A configuration. block_k: along the sum. parts: pieces in which a result tile is stored. programs: per
    multiprocessor, 0: one per tile.

    flatten: one pipelined loop over the steps of all tiles of a program ("outer" by descriptors always has one).
    descriptors: operands and results use tensor descriptors (TMA), where the device has them. reduce: the memory system
    adds fp32 sums to the result, each number once; otherwise the kernel reads, adds and writes.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 64
    num_warps: int = 8
    num_stages: int = 3
    parts: int = 1
    group: int = 8
    programs: int = 1
    flatten: bool = True
    descriptors: bool = True
    reduce: bool = True

    def shared_memory(self, out_size: int, element_size: int = 2) -> int:
        """Returns the bytes of operands in flight and of one part of the results; the compiler adds barriers and may
        overlap them.
        """
        stages = self.num_stages * (self.block_m + self.block_n) * self.block_k * element_size
        return stages + (self.block_m * self.block_n // self.parts * out_size if self.descriptors else 0)


# NVIDIA GPUs without a part of the table: 96 KiB of shared memory, no descriptors.
ANY_NVIDIA = GroupedConfig(block_n=128, num_warps=8, num_stages=3, flatten=False, descriptors=False)


@functools.cache
def read_table(path: Path = TABLE) -> dict[str, dict]:
    """Returns {"sm_90": {"measured_on", "rows": [{"kind", "rows", "k", "n", "config"}, ...]}, ...}; config as a
    GroupedConfig.
    """
    table = json.loads(path.read_text()).items()
    return {
        name: {**part, "rows": config_rows.parse(part["rows"], GroupedConfig, KINDS, path.name)} for name, part in table
    }


def choose_config(architecture: str, kind: str, rows: int, k: int, n: int) -> GroupedConfig:
    """Returns the nearest row in log scale of this device and kind; gfx942's rows for all AMD GPUs, ANY_NVIDIA for GPUs
    without rows.

    rows: of one expert, on average. k and n: the matrix's two sides, [k, n] for rows and rows_t, [m, n] of the result
    for outer.
    """
    return _nearest("gfx942" if architecture.startswith("gfx") else architecture, kind, rows, k, n)


@functools.lru_cache(maxsize=1024)  # every call of a product looks a row up
def _nearest(architecture: str, kind: str, rows: int, k: int, n: int) -> GroupedConfig:
    part = read_table().get(architecture)
    if part is None:
        return ANY_NVIDIA
    log = lambda number: math.log2(max(number, 1))  # noqa: E731

    def distance(row: dict) -> float:
        return sum(abs(log(mine) - log(row[name])) for name, mine in (("rows", rows), ("k", k), ("n", n)))

    return min((row for row in part["rows"] if row["kind"] == kind), key=distance)["config"]


def write_table(architecture: str, rows: list[dict], measured_on: str, path: Path = TABLE) -> None:
    """Replaces one device's rows, {"kind", "rows", "k", "n", "config": GroupedConfig, "ms"}; a new file starts from
    TABLE's.
    """
    table = {**read_table(path if path.exists() else TABLE), architecture: {"measured_on": measured_on, "rows": rows}}
    parts = [
        f'  {json.dumps(name)}: {{"measured_on": {json.dumps(part["measured_on"])}, "rows": [\n'
        f"{config_rows.dump(part['rows'], GroupedConfig())}\n  ]}}"
        for name, part in table.items()
    ]
    path.write_text("{\n" + ",\n".join(parts) + "\n}\n")
    read_table.cache_clear()
    _nearest.cache_clear()
