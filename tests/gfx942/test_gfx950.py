# SPDX-License-Identifier: Apache-2.0
"""The kernels of MI355X (gfx950): the shipped library's bytes in the emulator, all of its tests in one slow run, and what
Triton compiles for it.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.gfx942 import assembly_kernel, listing
from tests.gfx942.budgets import resources, triton_objects
from tests.gfx942.emulator import Device
from tests.gfx942.inner_loop import inner_loop
from tests.gfx942.toolchain import ARCH, TARGETS, shipped_object
from tests.hip_ops import cca_prologue_cases, cca_prologue_device, rms_norm_cases, rms_norm_device
from tests.hip_ops.expert_path_cases import MIXES, check_sort, expert_ids
from tests.hip_ops.expert_path_device import HipOnDevice
from tests.hip_ops.product_cases import ROUNDED_ONCE, symmetric_case
from tests.hip_ops.product_device import run_symmetric

ROOT = Path(__file__).resolve().parents[2]
U32 = np.uint32
# The files that compile or run kernels for a target; those that are left out compare with gfx942's compiler or registers.
FILES = (
    "tests/hip_ops/test_cca_prologue_gfx942.py",
    "tests/hip_ops/test_embedding_gradient_gfx942.py",
    "tests/hip_ops/test_expert_path_gfx942.py",
    "tests/hip_ops/test_gradient_addition_gfx942.py",
    "tests/hip_ops/test_grouped_product_gfx942.py",
    "tests/hip_ops/test_muon_gfx942.py",
    "tests/hip_ops/test_newton_schulz_start.py",
    "tests/hip_ops/test_rms_norm_gfx942.py",
    "tests/hip_ops/test_router_mlp_gfx942.py",
    "tests/hip_ops/test_symmetric_product_gfx942.py",
    "tests/hip_ops/test_vocabulary_exponentials_gfx942.py",
    "tests/hip_ops/test_vocabulary_rows_gfx942.py",
    "tests/gfx942/test_shipped_objects.py",
    "tests/gfx942/test_triton_objects.py",
    "tests/gfx942/test_vector_values.py",
    "tests/gfx942/test_lanes.py",
    "tests/gfx942/test_memory_access.py",
    "tests/gfx942/test_scalar_values.py",
    "tests/gfx942/test_waits.py",
    "tests/gfx942/test_xcd.py",
)


def of_gfx950(source: str) -> Path:
    return shipped_object(source, "gfx950")


# The shipped bytes


@pytest.mark.parametrize("kernel, n", [("ho_symmetric_bf16_128", 136), ("ho_symmetric_fp16_64", 72)])
def test_symmetric_product(kernel, n):
    case = symmetric_case(1, n, 168, kernel.split("_")[2])
    got, counters = run_symmetric(Device("reverse"), kernel, case, of_gfx950("symmetric_product"))
    assert (got == got.mT).all() and case.worst_ulps(got) <= ROUNDED_ONCE
    assert [*counters.mfma_by_opcode] == [f"v_mfma_f32_32x32x16_{kernel.split('_')[2].replace('fp', 'f')}"]


def test_rms_norm():
    emulated = rms_norm_device.Emulated(Device("reverse"), objects=of_gfx950)
    rms_norm_cases.check(emulated.implementation, rms_norm_cases.Case(True, 3, 45, pad=1))


def test_expert_sort():
    check_sort(HipOnDevice(Device("reverse"), objects=of_gfx950), expert_ids(MIXES[0], 700, 16), 16)


@pytest.mark.slow
def test_cca_prologue():
    case = cca_prologue_cases.Case(20, 2, 2, 1, halo=True, document=6, zero=True)
    cca_prologue_cases.check(cca_prologue_device.Emulated(Device("reverse"), objects=of_gfx950), case)


@pytest.mark.parametrize("kernel, accumulators", [("ho_general_bf16_256", 8), ("ho_symmetric_fp16_128", 4)])
def test_the_wide_instruction_halves_the_matrix_passes(kernel, accumulators):
    """Of two slabs of 32 in the inner loop; the other issue slots stay."""
    narrow, wide = (inner_loop(shipped_object("symmetric_product", target), kernel) for target in TARGETS)
    assert (narrow.mfma_passes, wide.mfma_passes) == (2 * 4 * accumulators * 8, 2 * 2 * accumulators * 8)
    assert wide.other_slots <= narrow.other_slots and wide.full_waits_after_barriers() == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(ARCH != "gfx942", reason="runs itself")
@pytest.mark.parametrize("file", FILES)
def test_all_that_runs_for_gfx942(file):
    """In a process of its own, whose tests take gfx950's objects (toolchain.py); tests with a bug switched on need the
    package of the compiler.
    """
    command = [sys.executable, "-m", "pytest", file, "-x", "-m", "not gpu", "-p", "no:cacheprovider"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"HIP_OPS_TEST_TARGET": "gfx950"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and re.search(r"\b[1-9]\d* passed", done.stdout), done.stdout[-6000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.skipif(ARCH != "gfx942", reason="runs itself")
def test_triton_compiles_all_cases_without_spills():
    program = "from tests.gfx942.test_gfx950 import check_triton; check_triton()"
    environment = os.environ | {"HIP_OPS_TEST_TARGET": "gfx950"}
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-6000:]


def check_triton() -> None:
    from tests.gfx942 import wait_states

    wide = 0
    for name, compiled in triton_objects().items():
        found = resources(compiled.path, compiled.name, compiled.shared, compiled.threads)
        assert (found.scratch, found.vgpr_spills, found.lds <= 163840) == (0, 0, True), (name, found)
        assert [str(one) for one in wait_states.scan(compiled.path)] == [], name
        for line, words, given in listing.reassembled(listing.listing(compiled.path)):
            assert words == given, (name, line)
            wide += line.startswith(("v_mfma_f32_32x32x16", "v_mfma_f32_16x16x32"))
    assert len(triton_objects()) >= 37 and wide > 100


# Its own instructions


def values_of(snippets: list[str], inputs: np.ndarray) -> np.ndarray:
    """Results in v8 and v9 of snippets over the four dwords v4 to v7 of each lane."""
    return assembly_kernel.run_snippets(snippets, inputs, "gfx950")


@pytest.fixture
def inputs() -> np.ndarray:
    return np.random.default_rng(5).integers(0, 2**32, (64, 4), dtype=U32)


def test_table_of_three(inputs):
    a, b, c = (inputs[:, place] for place in range(3))
    tables = {0x80: a & b & c, 0xFE: a | b | c, 0x96: a ^ b ^ c, 0xCA: (a & b) | (~a & c), 0x1: ~(a | b | c), 0xF0: a}
    found = values_of([f"v_bitop3_b32 v8, v4, v5, v6 bitop3:{table:#x}" for table in tables], inputs)
    assert np.array_equal(found[..., 0], [*tables.values()])
    (found,) = values_of(["v_bitop3_b16 v8, v4, v5, v6 bitop3:0x96"], inputs)
    assert np.array_equal(found[:, 0], (a ^ b ^ c) & 0xFFFF)


def test_conversions_to_pairs_of_halves(inputs):
    inputs[:6, 0] = np.array([0x3F808000, 0x3F818000, 0x7F7FFFFF, 0xFF800000, 0x00000001, 0x7FC01234], U32)
    inputs[:, 1] = (np.arange(64, dtype=np.float32) / 3).view(U32)
    (brain,) = values_of(["v_cvt_pk_bf16_f32 v8, v4, -v5"], inputs)
    low = inputs[:, 0].astype(np.uint64)
    nearest = (low + 0x7FFF + (low >> 16 & 1)) >> 16
    with np.errstate(invalid="ignore"):
        nan = np.isnan(inputs[:, 0].view(np.float32))
    assert np.array_equal((brain[:, 0] & 0xFFFF)[~nan], nearest[~nan])
    assert ((brain[:, 0] & 0x7FFF)[nan] > 0x7F80).all() and nan[5]
    (half,) = values_of(["v_cvt_pk_f16_f32 v8, v5, v5"], inputs)
    expected = inputs[:, 1].view(np.float32).astype(np.float16).view(np.uint16).astype(U32)
    assert np.array_equal(half[:, 0], expected | expected << 16)


def test_swapped_rows(inputs):
    moves = "v_mov_b32 v8, v4\n  v_mov_b32 v9, v5\n  s_nop 1\n  "
    for rows in (32, 16):
        (found,) = values_of([f"{moves}v_permlane{rows}_swap_b32 v8, v9"], inputs)
        one, two = (inputs[:, place].reshape(-1, 2, rows) for place in (0, 1))
        assert np.array_equal(found[:, 0].reshape(-1, 2, rows), np.stack([one[:, 0], two[:, 0]], 1))
        assert np.array_equal(found[:, 1].reshape(-1, 2, rows), np.stack([one[:, 1], two[:, 1]], 1))


def test_transposed_read(inputs):
    """The 16 x 16 halves that a row of lanes has written, four a lane: lane j holds column j of its four rows."""
    write = "v_lshlrev_b32 v10, 3, v0\n  ds_write_b64 v10, v[4:5]\n  s_waitcnt lgkmcnt(0)\n  "
    (found,) = values_of([f"{write}ds_read_b64_tr_b16 v[8:9], v10\n  s_waitcnt lgkmcnt(0)"], inputs)
    lanes = np.ascontiguousarray(inputs[:, :2]).view(np.uint16).reshape(4, 16, 4)
    expected = np.empty((4, 16, 4), np.uint16)
    for lane in range(16):
        for place in range(4):
            expected[:, lane, place] = lanes[:, 4 * place + lane // 4, lane % 4]
    assert np.array_equal(found.view(np.uint16).reshape(4, 16, 4), expected)
