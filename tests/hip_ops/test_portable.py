# SPDX-License-Identifier: Apache-2.0
"""Test the guarantees of portable.h on the CPU and in clang's code for gfx942; tests/gpu runs it on a GPU."""

import re
import subprocess

import numpy as np
import pytest

from hip_ops.runtime.build import CSRC
from tests.gfx942.toolchain import compiler, flags_of, path_flags
from tests.hip_ops.cpu_kernels import KERNELS, SCHEDULES, cpu_kernels, schedule

PORTABLE = KERNELS / "portable.hip"


@pytest.fixture(scope="module", params=["by hand", "ucontext"])
def kernels(request):
    """The two ways of switching stacks; the second is what machines other than x86-64 have."""
    return cpu_kernels(PORTABLE, defines=["HO_CPU_UCONTEXT"] if request.param == "ucontext" else [])


@pytest.fixture(params=SCHEDULES)
def order(request):
    with schedule(request.param):
        yield request.param


def as_bf16(values: np.ndarray) -> np.ndarray:
    """Bits, rounded to nearest even; `values` hold no NaN."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("mask", [1, 2, 7, 16, 31, 32, 63])
def test_wave_exchange_and_sum(kernels, order, mask):
    x = np.random.default_rng(mask).standard_normal(3 * 256).astype(np.float32)
    out, sums = np.zeros_like(x), np.zeros_like(x)
    assert kernels.ho_test_waves_run(x, out, sums, 3, mask, None) == 0
    assert np.array_equal(out, x[np.arange(x.size) ^ mask])
    waves = sums.reshape(-1, 64)
    assert (waves == waves[:, :1]).all(), "all lanes hold the same bits"
    np.testing.assert_allclose(waves[:, 0], x.reshape(-1, 64).astype(np.float64).sum(1), rtol=0, atol=64 * 2**-24 * 4)


@pytest.mark.parametrize("threads", [64, 256])
def test_places(kernels, order, threads):
    out = np.full((5, 3, threads, 4), -1, np.int32)
    assert kernels.ho_test_places_run(out, 3, 5, threads, None) == 0
    y, x, t = np.meshgrid(np.arange(5), np.arange(3), np.arange(threads), indexing="ij")
    assert np.array_equal(out, np.stack([1000 * y + x, t, t % 64, t // 64], -1))


@pytest.mark.parametrize("lds_only", [0, 1])
def test_barriers(kernels, order, lds_only):
    x = np.arange(2 * 1024, dtype=np.float32)
    out = np.zeros_like(x)
    assert kernels.ho_test_reverse_run(x, out, 2, lds_only, None) == 0
    assert np.array_equal(out, x.reshape(2, 1024)[:, ::-1].ravel())


def test_a_lost_barrier_shows_under_every_schedule(order):
    x = np.arange(1024, dtype=np.float32)
    out = np.zeros_like(x)
    assert cpu_kernels(PORTABLE, defines=["BUG_NO_BARRIER"]).ho_test_reverse_run(x, out, 1, 0, None) == 0
    assert np.isnan(out).any(), "a thread read what no other had written yet"


def test_wave_sync(kernels, order):
    x = np.arange(512, dtype=np.float32)
    out = np.zeros_like(x)
    assert kernels.ho_test_reverse_wave_run(x, out, 2, None) == 0
    assert np.array_equal(out, x.reshape(-1, 64)[:, ::-1].ravel())


def test_big_lds(kernels):
    x = np.arange(14 * 1024, dtype=np.float32)
    out = np.zeros_like(x)
    assert kernels.ho_test_big_lds_run(x, out, None) == 0
    assert np.array_equal(out, x[::-1])


@pytest.mark.parametrize("m", [32, 16])
@pytest.mark.parametrize("wide", [0, 1])
def test_matrix_products(kernels, order, m, wide):
    """Sums of integers up to 8 are exact in fp32, so one wrong element is visible."""
    rng = np.random.default_rng(m)
    k = 256 // m << wide
    a, b = rng.integers(-8, 9, (m, k)), rng.integers(-8, 9, (k, m))
    c = rng.integers(-8, 9, (m, m))
    out = c.astype(np.float32)
    assert kernels.ho_test_mfma_run(as_bf16(a), as_bf16(b), out, m, wide, None) == 0
    assert np.array_equal(out, a @ b + c)


@pytest.mark.parametrize("m", [32, 16])
def test_the_wide_matrix_products_of_gfx950(order, m):
    test_matrix_products(cpu_kernels(PORTABLE, defines=["HO_WIDE_MFMA=1"]), order, m, 1)


def test_matrix_product_without_variant(kernels):
    assert kernels.ho_test_mfma_run(None, None, None, 8, 0, None) == -1


def test_bf16_rounds_to_nearest_even_and_keeps_nan(kernels):
    ties = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x80000000], np.uint32).view(
        np.float32
    )
    assert as_bf16(ties).tolist() == [0x3F80, 0x3F82, 0x3F81, 0x3F80, 0x7F80, 0x8000]
    rest = np.random.default_rng(0).integers(0, 2**32, 2042, dtype=np.uint32).view(np.float32)
    x = np.concatenate([ties, rest])
    x[:2048:97] = np.nan
    out, back = np.zeros(2048, np.uint16), np.zeros(2048, np.float32)
    assert kernels.ho_test_bf16_run(x, out, back, 2048, None) == 0
    nan = np.isnan(x)
    assert (out[nan] == 0x7FC0).all() and nan.sum() > 20
    assert np.array_equal(out[~nan], as_bf16(x[~nan]))
    assert np.array_equal(back.view(np.uint32), out.astype(np.uint32) << 16)


def test_words(kernels):
    x, out = np.arange(256, dtype=np.uint32), np.zeros(256, np.uint32)
    assert kernels.ho_test_words_run(x, out, None) == 0
    assert np.array_equal(out[1:], x[1:]) and out[0] == 1


def test_an_empty_grid_launches_nothing(kernels):
    assert kernels.ho_test_waves_run(None, None, None, 0, 1, None) == 0


def ran_in(kernels, name: str) -> tuple[list[int], list[int]]:
    counter, blocks, lanes = np.zeros(2, np.int32), np.zeros(8, np.int32), np.zeros(64, np.int32)
    with schedule(name):
        assert kernels.ho_test_order_run(counter, blocks, lanes, 8, None) == 0
    return blocks.tolist(), lanes.tolist()


def test_schedules(kernels):
    assert ran_in(kernels, "forward") == (list(range(8)), list(range(64)))
    assert ran_in(kernels, "reverse") == (list(range(7, -1, -1)), list(range(63, -1, -1)))
    one, two = ran_in(kernels, "random:1"), ran_in(kernels, "random:2")
    assert one == ran_in(kernels, "random:1") and one != two
    for blocks, lanes in (one, two):
        assert sorted(blocks) == list(range(8)) != blocks
        assert sorted(lanes) == list(range(64)) != lanes


def assembly(source, *flags: str) -> str:
    command = [
        *compiler(newer=False),
        *flags_of("gfx942", newer=False),
        *path_flags("gfx942", newer=False),
        f"-I{CSRC}",
        *flags,
        "--cuda-device-only",
        "-S",
        str(source),
        "-o",
        "-",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


IN_FLIGHT = """
#include "portable.h"
HO_KERNEL(ho_test_in_flight, 256)(const float* in, float* out) {
  HO_LDS(float, tile, 256);
  const f32x4 later = load16(in + 4 * threadIdx.x);
  tile[threadIdx.x] = float(threadIdx.x);
  block_sync_lds();
  out[threadIdx.x] = tile[threadIdx.x ^ 64] + later[0] + later[1] + later[2] + later[3];
}
"""


@pytest.mark.parametrize("fence", [1, 0])
def test_the_lds_barrier_leaves_loads_in_flight_on_gfx942(require_tool, tmp_path, fence):
    """Between the load and the barrier nothing may wait for vmcnt; fence=0 is the form for compilers before clang
    19.1.
    """
    require_tool("clang++-19")
    source = tmp_path / "in_flight.hip"
    source.write_text(IN_FLIGHT)
    text = assembly(source, f"-DHO_FENCE_OF_LDS={fence}")
    between = text[text.index("global_load_dwordx4") : text.index("s_barrier")]
    assert "ds_write_b32" in between and re.search(r"s_waitcnt lgkmcnt\(0\)\s*$", between)
    assert "vmcnt" not in between
    after = text[text.index("s_barrier") :]
    assert after.index("ds_read_b32") < after.index("vmcnt(0)") < after.index("global_store_dword")


def test_gfx942_instructions(require_tool):
    """The kernels above use the instructions that portable.h is for, and no flat addresses."""
    require_tool("clang++-19")
    text = assembly(PORTABLE)
    bodies = dict(re.findall(r"^(ho_test_\w+):.*?\n(.*?)^\s+s_endpgm", text, flags=re.S | re.M))
    assert "v_mfma_f32_32x32x8_bf16" in bodies["ho_test_mfma_32"]
    assert "v_mfma_f32_16x16x16_bf16" in bodies["ho_test_mfma_16"]
    assert bodies["ho_test_mfma_32_wide"].count("v_mfma_f32_32x32x8_bf16") == 2
    assert bodies["ho_test_waves"].count("ds_bpermute_b32") == 7
    assert re.search(r"global_load_dwordx4 .* nt\b", bodies["ho_test_bf16"]) and re.search(
        r"global_store_dwordx4 .* nt\b", bodies["ho_test_bf16"]
    )
    assert "ds_write_b128" in bodies["ho_test_reverse"] and "ds_read_b128" in bodies["ho_test_reverse"]
    assert not re.search(r"\bflat_(load|store)", text) and "v_readfirstlane" in bodies["ho_test_places"]
