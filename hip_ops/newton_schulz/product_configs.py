# SPDX-License-Identifier: Apache-2.0
"""Which tile, pipeline and engine a product runs with: rows of product_configs.json, the nearest one of the same kind.

Kinds: "gram" (symmetric, k is the long side), "square" (symmetric, k = n), "update" (general). benchmarks/research/tune_symmetric_product.py
measures the candidates on one device and writes the file; "measured_on" says on which, or that the rows were derived, not measured.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

TABLE = Path(__file__).with_name("product_configs.json")
KINDS = ("gram", "square", "update")
HOPPER_SHARED_MEMORY = 232448  # bytes a block may have; sm_90


@dataclass(frozen=True)
class ProductConfig:
    """engine "triton", or "cublas": torch.baddbmm, which computes the whole square (then nothing else below counts)."""

    engine: str = "triton"
    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    parts: int = 1
    num_warps: int = 8
    num_stages: int = 3
    persistent: bool = True
    flatten: bool = True
    warp_specialize: bool = False

    def shared_memory(self, element_size: int = 2) -> int:
        """Bytes that operands in flight and one part of the results need; the compiler adds barriers and may overlap them."""
        stages = self.num_stages * (self.block_m + self.block_n) * self.block_k * element_size
        return stages + self.block_m * self.block_n // self.parts * element_size


# LDS of MI300X is 64 KiB, and its compiler has neither wgmma nor flattened loops to gain from.
GFX942_CONFIG = ProductConfig(num_warps=4, num_stages=2, persistent=False, flatten=False)

# Without descriptors the table's rows do not count; 96 KiB of shared memory is what NVIDIA GPUs before Hopper have.
BEFORE_HOPPER_CONFIG = ProductConfig(persistent=False, flatten=False)


def read_table(path: Path = TABLE) -> tuple[str, list[dict]]:
    """What the table was measured on, and its rows as `write_table` takes them."""
    table, known = json.loads(path.read_text()), {field.name for field in fields(ProductConfig)}
    for row in table["rows"]:
        assert row["kind"] in KINDS and set(row["config"]) <= known, f"{path.name}: {row}"
        row["config"] = ProductConfig(**row["config"])
    return table["measured_on"], table["rows"]


@functools.cache
def _rows() -> tuple[tuple[str, int, int, int, ProductConfig], ...]:
    return tuple((row["kind"], row["batch"], row["n"], row["m"], row["config"]) for row in read_table()[1])


def choose_config(kind: str, batch: int, n: int, m: int, amd: bool = False) -> ProductConfig:
    """The row of this kind whose (n, batch * n * n, m) is nearest in log scale. n is the small side of X [batch, n, m]."""
    if amd:
        return GFX942_CONFIG
    log = math.log2

    def distance(row) -> float:
        _, batch_, n_, m_, _ = row
        work = abs(log(batch * n * n) - log(batch_ * n_ * n_))
        return work + 0.5 * abs(log(n) - log(n_)) + 0.25 * abs(log(m) - log(m_))

    return min((row for row in _rows() if row[0] == kind), key=distance)[4]


def write_table(rows: list[dict], measured_on: str, path: Path = TABLE) -> None:
    """rows: {"kind", "batch", "n", "m", "config": ProductConfig, "ms"}; only settings that differ from the defaults are kept."""
    default = asdict(ProductConfig())
    lines = []
    for row in rows:
        config = {key: value for key, value in asdict(row["config"]).items() if value != default[key]}
        lines.append("    " + json.dumps({**row, "config": config}))
    path.write_text(
        '{\n  "measured_on": ' + json.dumps(measured_on) + ',\n  "rows": [\n' + ",\n".join(lines) + "\n  ]\n}\n"
    )
    _rows.cache_clear()
