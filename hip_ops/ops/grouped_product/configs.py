# SPDX-License-Identifier: Apache-2.0
"""Chooses tiles and pipelines of Triton's grouped products: the nearest row of grouped_configs.json of the same device
and kind, or, on AMD GPUs without rows, the tile that `derived_config` expects to finish first.

Kinds: "rows_t" (x W_e^T, W_e stored [n, k]), "rows" (x W_e, W_e stored [k, n]), "outer" (a_e^T b_e).
benchmarks/research/tune_grouped_product.py measures the candidates on one device and writes its part of the file;
"measured_on" names the device.
"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

from hip_ops.runtime.tile_choice import nearest, parse, relative_time

TABLE = Path(__file__).with_name("grouped_configs.json")
KINDS = ("rows_t", "rows", "outer")


@dataclass(frozen=True)
class GroupedConfig:
    """A configuration. block_k: along the sum. parts: pieces in which a result tile is stored. programs: per
    multiprocessor, 0: one per tile.

    flatten: one pipelined loop over the steps of all tiles of a program ("outer" by descriptors always has one).
    descriptors: operands and results use tensor descriptors (TMA), where the device has them. reduce: the memory system
    adds fp32 sums to the result, each number once; otherwise the kernel reads, adds and writes. waves_per_eu,
    matrix_instr_nonkdim and kpack: options of Triton's AMD compiler; the defaults are not passed.
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
    waves_per_eu: int = 0
    matrix_instr_nonkdim: int = 0
    kpack: int = 1

    def launch_options(self) -> dict[str, int]:
        """Return the options of Triton's compiler."""
        only_amd = {
            name: getattr(self, name)
            for name in ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
            if getattr(self, name) != getattr(GroupedConfig, name)
        }
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, **only_amd}


# NVIDIA GPUs without a part of the table: 96 KiB of shared memory, no descriptors.
ANY_NVIDIA = GroupedConfig(block_n=128, num_warps=8, num_stages=3, flatten=False, descriptors=False)


_AMD = GroupedConfig(num_stages=2, programs=0, flatten=False, descriptors=False)
_MFMA16 = replace(_AMD, matrix_instr_nonkdim=16)
_NARROW = replace(_MFMA16, block_n=128, num_warps=4)


@dataclass(frozen=True)
class Candidate:
    """A tile, and the arguments of `relative_time` for its compiled inner loop. kpack=2 has LDS bank conflicts where an
    operand is transposed.
    """

    config: GroupedConfig
    other_slots: int
    lds: int


# For gfx942; the last one of a kind takes matrices of any size. None spills registers, with Triton 3.5 to 3.8. Tiles of
# 256 x 256 x 64 get the compiler's schedule of four clusters, in which one wave of a SIMD computes while the other one
# loads; "rows" takes half the depth because at 64 it spills 6 to 16 registers, and "outer" more than 100.
DERIVED = {
    "rows_t": (
        Candidate(replace(_MFMA16, block_m=256), 51, 128),
        Candidate(replace(_MFMA16, block_m=256, block_n=128, kpack=2), 72, 176),
        Candidate(replace(_NARROW, kpack=2), 88, 192),
    ),
    "rows": (
        Candidate(replace(_MFMA16, block_m=256, block_k=32), 65, 176),
        Candidate(replace(_MFMA16, block_m=256, block_n=128), 91, 176),
        Candidate(_NARROW, 109, 192),
    ),
    "outer": (Candidate(_MFMA16, 141, 176), Candidate(replace(_NARROW, block_k=32, waves_per_eu=2), 182, 256)),
}

# For gfx950, whose MFMA passes multiply twice as much; LDS times are at CDNA3's rate. kpack is 1, which it requires. Tiles
# of 256 x 256 x 64 spill registers though LDS, 160 KB, has room for them.
DERIVED_OF_GFX950 = {
    "rows_t": (
        Candidate(replace(_AMD, block_m=256, block_k=32), 92, 448),
        Candidate(replace(_MFMA16, block_m=256, block_n=128), 104, 608),
        Candidate(_NARROW, 144, 640),
    ),
    "rows": (
        Candidate(replace(_AMD, block_m=256, block_k=32), 102, 448),
        Candidate(replace(_MFMA16, block_m=256, block_n=128), 144, 608),
        Candidate(_NARROW, 168, 640),
    ),
    "outer": (Candidate(_MFMA16, 194, 608), Candidate(replace(_NARROW, block_k=32, waves_per_eu=2), 220, 640)),
}


def candidates(architecture: str) -> dict[str, tuple[Candidate, ...]]:
    """Return the candidates of an AMD GPU by kind."""
    return DERIVED_OF_GFX950 if architecture == "gfx950" else DERIVED


@functools.lru_cache(maxsize=1024)
def derived_config(architecture: str, kind: str, experts: int, rows: int, k: int, n: int) -> GroupedConfig:
    """Return the configuration of the candidate that finishes first by `relative_time`.

    An expert's rows end in the middle of a tile on average, so it has rows / block_m + 1/2 tiles in a column. Matrices
    whose sides are no multiples of 64 take the last candidate, because masks and loads of single elements need more
    registers.
    """
    choices = candidates(architecture)[kind]
    if k % 64 or n % 64:
        return choices[-1].config

    def finished(candidate: Candidate) -> float:
        config = candidate.config
        down = math.ceil(k / config.block_m) if kind == "outer" else rows / config.block_m + 0.5
        tiles = experts * down * math.ceil(n / config.block_n)
        return relative_time(architecture, tiles, config.block_m * config.block_n, candidate.other_slots, candidate.lds)

    return min(choices, key=finished).config


@functools.cache
def read_table(path: Path = TABLE) -> dict[str, dict]:
    """Return {"sm_90": {"measured_on", "rows": [{"kind", "rows", "k", "n", "config"}, ...]}, ...}; config as a
    GroupedConfig.
    """
    table = json.loads(path.read_text()).items()
    return {name: {**part, "rows": parse(part["rows"], GroupedConfig, KINDS, path.name)} for name, part in table}


def choose_config(architecture: str, kind: str, rows: int, k: int, n: int, experts: int = 16) -> GroupedConfig:
    """Return the nearest row in log scale of this device and kind. Without rows of the device: `derived_config` for AMD
    GPUs, ANY_NVIDIA for others.

    rows: of one expert, on average. k and n: the matrix's two sides, [k, n] for rows and rows_t, [m, n] of the result
    for outer.
    """
    if architecture in read_table():
        return _nearest(architecture, kind, rows, k, n)
    if not architecture.startswith("gfx"):
        return ANY_NVIDIA
    config = derived_config(architecture, kind, experts, rows, k, n)
    return config if architecture == "gfx942" else replace(config, kpack=1)


@functools.lru_cache(maxsize=1024)  # every call of a product looks a row up
def _nearest(architecture: str, kind: str, rows: int, k: int, n: int) -> GroupedConfig:
    return nearest(read_table()[architecture]["rows"], kind, rows=(rows, 1.0), k=(k, 1.0), n=(n, 1.0))
