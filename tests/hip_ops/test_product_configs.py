# SPDX-License-Identifier: Apache-2.0
"""Test the table of Triton configurations, the tile order of its kernel, and the code compiled for Hopper (no GPU
needed).
"""

import json
import re

import pytest
import torch

from benchmarks.research.tuning_tables import SHARED_MEMORY, shared_memory, write_products
from hip_ops.ops.newton_schulz.product_configs import KINDS, TABLE, ProductConfig, choose_config
from tests.hip_ops.compiled_for_hopper import compiled_for_hopper

pytest.importorskip("triton")

from hip_ops.ops.newton_schulz.plan import tile_count  # noqa: E402
from hip_ops.ops.newton_schulz.triton import empty_rows, stored, symmetric_product_kernel  # noqa: E402


def test_table_has_every_kind_and_fits_the_machine():
    table = json.loads(TABLE.read_text())
    assert table["measured_on"] and {row["kind"] for row in table["rows"]} == set(KINDS)
    for row in table["rows"]:
        config = ProductConfig(**row["config"])
        assert config.engine in ("triton", "cublas") and config.num_warps in (4, 8) and config.parts in (1, 2)
        assert shared_memory(config) <= SHARED_MEMORY["sm_90"]
        # Two warps of four a block row of 64: what one wgmma of a warp group takes.
        assert config.block_m % (64 * config.num_warps // 4) == 0 or config.block_m == 64
        assert row["kind"] == "update" or config.block_m in (config.block_n // 2, config.block_n, 2 * config.block_n)


def test_nearest_row_is_chosen():
    rows = [row for row in json.loads(TABLE.read_text())["rows"] if row["kind"] == "gram"]
    for row in rows:
        assert choose_config("gram", row["batch"], row["n"], row["m"]) == ProductConfig(**row["config"])
    assert choose_config("gram", 24, 2048, 4096) == choose_config("gram", 16, 2048, 4096)
    assert choose_config("square", 1, 17, 17) == choose_config("square", 1, 256, 256)


def test_written_table_reads_back(tmp_path):
    config = ProductConfig(block_n=256, parts=2)
    write_products(
        [{"kind": "gram", "batch": 1, "n": 8, "m": 9, "config": config, "ms": 0.5}], "a test", tmp_path / "t.json"
    )
    (row,) = json.loads((tmp_path / "t.json").read_text())["rows"]
    assert row["config"] == {"block_n": 256, "parts": 2} and ProductConfig(**row["config"]) == config


def triangle(position: int, block_m: int, block_n: int) -> tuple[int, int]:
    """Return the result of `triangle_tile` by search."""
    row = 0
    while True:
        columns = (row * block_m + block_m - 1) // block_n + 1
        if position < columns:
            return row, position
        position, row = position - columns, row + 1


@pytest.mark.parametrize("block_m, block_n", [(128, 128), (128, 256), (256, 128)])
@pytest.mark.parametrize("n", [1, 128, 300, 2048])
def test_tiles_cover_the_lower_triangle_once(n, block_m, block_n):
    covered = torch.zeros(n, n, dtype=torch.int32)
    for position in range(tile_count(True, n, n, block_m, block_n)):
        row, column = triangle(position, block_m, block_n)
        rows, columns = slice(row * block_m, (row + 1) * block_m), slice(column * block_n, (column + 1) * block_n)
        covered[rows, columns] += 1
        if (column + 1) * block_n <= row * block_m:  # its mirror image is stored too
            covered[columns, rows] += 1
    assert (covered == 1).all()


@pytest.mark.parametrize("block_m, block_n", [(128, 128), (128, 256), (256, 128)])
def test_closed_form_of_the_tile_order(block_m, block_n):
    """The kernel's arithmetic, in float32 as there, for every position up to n = 65536."""
    count = tile_count(True, 65536, 65536, block_m, block_n)
    position = torch.arange(count, dtype=torch.int32)
    x = position.to(torch.float32)
    if block_m == block_n:
        row = ((torch.sqrt(8.0 * x + 1.0) - 1.0) * 0.5).to(torch.int32)
        row = torch.where(row * (row + 1) // 2 > position, row - 1, row)
        row = torch.where((row + 1) * (row + 2) // 2 <= position, row + 1, row)
        column = position - row * (row + 1) // 2
    else:
        pair = ((torch.sqrt(4.0 * x + 1.0) - 1.0) * 0.5).to(torch.int32)
        pair = torch.where(pair * (pair + 1) > position, pair - 1, pair)
        pair = torch.where((pair + 1) * (pair + 2) <= position, pair + 1, pair)
        rest = position - pair * (pair + 1)
        row, column = (pair, rest) if block_m > block_n else (2 * pair + rest // (pair + 1), rest % (pair + 1))
    rows = torch.arange(-(-65536 // block_m))
    columns = (rows * block_m + block_m - 1) // block_n + 1
    assert torch.equal(row.long(), torch.repeat_interleave(rows, columns))
    assert torch.equal(column.long(), torch.cat([torch.arange(c) for c in columns.tolist()]))


def test_operands_keep_their_storage():
    x = torch.randn(2, 16, 24).bfloat16()
    assert stored(x)[0] is x and not stored(x)[1]
    assert stored(x.mT)[0].data_ptr() == x.data_ptr() and stored(x.mT)[1]
    odd = torch.randn(2, 16, 17).bfloat16()
    copy, by_columns = stored(odd)
    assert torch.equal(copy, odd) and not by_columns and copy.stride() == (16 * 24, 24, 1)
    assert empty_rows(2, 3, 16, like=x).is_contiguous() and empty_rows(2, 3, 17, like=x).stride(1) == 24


def compile_for_hopper(config: ProductConfig, symmetric: bool, by_columns: bool, with_d: bool):
    m, n, k, width = config.block_m, config.block_n, config.block_k, config.block_n // config.parts

    def block(rows, columns):
        return f"tensordesc<fp16[1,{rows},{columns}]>"

    signature = {
        "a_desc": block(k, m) if by_columns else block(m, k),
        "b_desc": block(k, n) if by_columns else block(n, k),
        "d_desc": block(m, width) if with_d else "constexpr",
        "c_desc": block(m, width),
        "mirror_desc": block(width, m) if symmetric else "constexpr",
        **dict.fromkeys(("batch", "m", "n", "k"), "i32"),
        **dict.fromkeys(("alpha", "beta"), "fp32"),
    }
    flags = dict(
        SYMMETRIC=symmetric,
        A_BY_COLUMNS=by_columns,
        B_BY_COLUMNS=by_columns,
        HAS_D=with_d,
        BLOCK_M=m,
        BLOCK_N=n,
        BLOCK_K=k,
        PARTS=config.parts,
        GROUP=8,
        FLATTEN=config.flatten,
        WARP_SPECIALIZE=config.warp_specialize,
    )
    flags |= {name: None for name, kind in signature.items() if kind == "constexpr"}
    return compiled_for_hopper(
        symmetric_product_kernel, signature, flags, num_warps=config.num_warps, num_stages=config.num_stages
    )


def check_for_hopper(compiled, config: ProductConfig) -> None:
    ptx = compiled.asm["ptx"]
    instruction = f"wgmma.mma_async.sync.aligned.m64n{config.block_n}k16.f32.f16.f16"
    assert ptx.count(instruction) == config.block_k // 16 * max(1, config.block_m // (64 * config.num_warps // 4))
    assert "cp.async.bulk.tensor.3d.shared" in ptx and "cp.async.bulk.tensor.3d.global.shared" in ptx
    # nothing spilled by the front end; ptxas is given 255 registers
    assert not re.search(r"\b(ld|st)\.local\b|\.local \.align", ptx)
    assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
    # a product in flight while the next slab lands
    assert "warp_group_dot_wait" in compiled.asm["ttgir"] and "pendings = 1" in compiled.asm["ttgir"]


def test_large_symmetric_product_compiles_to_wgmma_and_tma():
    config = choose_config("square", 16, 2048, 2048)
    check_for_hopper(compile_for_hopper(config, symmetric=True, by_columns=False, with_d=True), config)


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", json.loads(TABLE.read_text())["rows"], ids=lambda row: f"{row['kind']}-{row['batch']}-{row['n']}"
)
def test_every_row_compiles_for_hopper(row):
    config = ProductConfig(**row["config"])
    if config.engine == "triton":
        symmetric, with_d = row["kind"] != "update", row["kind"] != "gram"
        for by_columns in (False, True):
            check_for_hopper(compile_for_hopper(config, symmetric, by_columns, with_d), config)
