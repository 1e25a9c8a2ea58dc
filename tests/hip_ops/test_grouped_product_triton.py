# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of grouped products in Triton's interpreter, and what the compiler makes of them for Hopper (no
GPU needed).

fp32 only in the interpreter, whose bf16 rounding is its own and which cannot add in memory; compiled code for gfx942
runs in test_grouped_product_gfx942.py.
"""

import re

import pytest

from benchmarks.research.tuning_tables import SHARED_MEMORY
from hip_ops.ops.grouped_product.configs import GroupedConfig, read_table
from tests.hip_ops.compiled_for_hopper import compiled_for_hopper
from tests.hip_ops.torch_process import run_with_torch

pytest.importorskip("triton")

PROGRAM = """
import functools
from types import SimpleNamespace
from hip_ops.ops.grouped_product import triton as kernels
from benchmarks.research.tuning_tables import SHARED_MEMORY
from hip_ops.ops.grouped_product.configs import GroupedConfig
from tests.hip_ops.grouped_cases import Grouped, check_outer, check_rows

def backend(**options):
    config = GroupedConfig(block_m=16, block_k=16, group=2, reduce=False, **options)
    return SimpleNamespace(**{name: functools.partial(getattr(kernels, name),
        config=config) for name in ("grouped_rows", "grouped_outer_")})

uneven, even, nothing = (0, 3, 0, 37, 5), (16, 17), (0, 0)
described = backend(block_n=32, parts=2)
for flag in (False, True):
    check_rows(described, Grouped(uneven, 24, 36, "fp32"), flag)
    check_outer(described, Grouped(uneven, 24, 36, "fp32"), flag)
    check_outer(described, Grouped(nothing, 24, 36, "fp32"), flag)
check_outer(backend(block_n=32, parts=1), Grouped(uneven, 24, 36, "fp32"), True)
by_pointers = backend(block_n=16, descriptors=False)
check_rows(by_pointers, Grouped(uneven, 18, 20, "fp32", pad=3), False)
check_outer(by_pointers, Grouped(uneven, 18, 20, "fp32", pad=3), True)
check_rows(backend(block_n=16, descriptors=False, programs=0), Grouped(even, 16, 8, "fp32", padding_rows=0), True)
check_outer(by_pointers, Grouped((3, 0), 16, 8, "fp32"), False)
odd = Grouped((2, 3), 18, 19, "fp32", pad=1)  # no descriptor reads rows of 19 * 4 bytes: falls back to pointers
check_rows(described, odd, False)
check_outer(described, odd, True)
empty = Grouped((0, 0), 8, 4, "fp32", padding_rows=0)
for flag in (False, True):
    check_rows(described, empty, flag)
    check_outer(described, empty, flag)
print("right")
"""


def test_in_the_interpreter():
    done = run_with_torch(PROGRAM, TRITON_INTERPRET="1")
    assert done.returncode == 0 and "right" in done.stdout, done.stderr[-4000:]


def compile_for_hopper(kind: str, config: GroupedConfig):
    from hip_ops.ops.grouped_product import triton, triton_kernels

    m, n, k, width = config.block_m, config.block_n, config.block_k, config.block_n // config.parts

    def block(*shape, dtype="bf16"):
        return f"tensordesc<{dtype}[{','.join(map(str, shape))}]>"

    constants = triton._constants(16, config) | {"PARTS": config.parts}
    if kind == "outer":
        kernel = triton_kernels.grouped_outer_kernel
        described = {
            "a_desc": block(1, 1, k, m),
            "b_desc": block(1, 1, k, n),
            "out_desc": block(1, m, width, dtype="fp32"),
        }
        constants |= {"ACCUMULATE": True, "REDUCE": config.reduce}
    else:
        kernel = triton_kernels.grouped_rows_kernel
        matrix = block(1, n, k) if kind == "rows_t" else block(1, k, n)
        described = {"x_desc": block(m, k), "w_desc": matrix, "out_desc": block(1, 1, m, width)}
        constants |= {"TRANSPOSED": kind == "rows_t", "FLATTEN": config.flatten}
    signature = dict.fromkeys(kernel.arg_names, "i32") | {"offsets": "*i32"} | described
    return compiled_for_hopper(kernel, signature, constants, num_warps=config.num_warps, num_stages=config.num_stages)


def check_for_hopper(compiled, kind: str, config: GroupedConfig) -> None:
    ptx = compiled.asm["ptx"]
    instruction = f"wgmma.mma_async.sync.aligned.m64n{config.block_n}k16.f32.bf16.bf16"
    assert ptx.count(instruction) == config.block_k // 16 * (config.block_m // (64 * config.num_warps // 4))
    assert not re.search(r"\b(ld|st)\.local\b|\.local \.align", ptx)
    assert "st.global" not in ptx, "results leave through descriptors"
    how = "cp.reduce.async" if kind == "outer" and config.reduce else "cp.async"
    leaves = f"{how}.bulk.tensor.{3 if kind == 'outer' else 4}d.global.shared"
    assert leaves in ptx
    assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
    assert "pendings = 1" in compiled.asm["ttgir"]  # a product in flight while the next slab lands
    if config.flatten:  # one loop: the pipeline does not drain between tiles
        loops = compiled.asm["ttgir"].count("scf.for")
        assert loops == 1 if kind == "outer" else loops <= 2


@pytest.mark.parametrize("kind", ["rows_t", "outer"])
def test_compiles_to_wgmma_and_tma(kind):
    row = next(row for row in read_table()["sm_90"]["rows"] if row["kind"] == kind)
    check_for_hopper(compile_for_hopper(kind, row["config"]), kind, row["config"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "row", read_table()["sm_90"]["rows"], ids=lambda row: f"{row['kind']}-{row['rows']}-{row['k']}x{row['n']}"
)
def test_every_row_compiles_for_hopper(row):
    check_for_hopper(compile_for_hopper(row["kind"], row["config"]), row["kind"], row["config"])
