# SPDX-License-Identifier: Apache-2.0
"""Chooses tile, pipeline and engine of a product: the nearest row of product_configs.json of the same kind.

Kinds: "gram" (symmetric, k is the long side), "square" (symmetric, k = n), "update" (general).
benchmarks/research/tune_symmetric_product.py measures the candidates on one device and writes the file; "measured_on"
names the device, or says that the rows were derived, not measured.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path

from hip_ops.runtime.tile_choice import nearest, parse

TABLE = Path(__file__).with_name("product_configs.json")
KINDS = ("gram", "square", "update")


@dataclass(frozen=True)
class ProductConfig:
    """A configuration. engine: "triton", or "cublas" for torch.baddbmm, which computes the whole square and ignores the
    other fields.
    """

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


# MI300X has 64 KiB of LDS, and its compiler gains nothing from flattened loops.
GFX942_CONFIG = ProductConfig(num_warps=4, num_stages=2, persistent=False, flatten=False)

# For kernels without descriptors, which the table does not cover; NVIDIA GPUs before Hopper have 96 KiB of shared
# memory.
BEFORE_HOPPER_CONFIG = ProductConfig(persistent=False, flatten=False)


def read_table(path: Path = TABLE) -> tuple[str, list[dict]]:
    """Return the device that the table was measured on, and its rows, {"kind", "batch", "n", "m", "config", "ms"}."""
    table = json.loads(path.read_text())
    return table["measured_on"], parse(table["rows"], ProductConfig, KINDS, path.name)


@functools.cache
def _rows() -> list[dict]:
    return [row | {"work": row["batch"] * row["n"] ** 2} for row in read_table()[1]]


def choose_config(kind: str, batch: int, n: int, m: int, amd: bool = False) -> ProductConfig:
    """Return the row of this kind whose (n, batch * n * n, m) is nearest in log scale. n is the small side of X
    [batch, n, m].
    """
    if amd:
        return GFX942_CONFIG
    return nearest(_rows(), kind, work=(batch * n * n, 1.0), n=(n, 0.5), m=(m, 0.25))
