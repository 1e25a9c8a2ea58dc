# SPDX-License-Identifier: Apache-2.0
"""Triton's grouped products, compiled for gfx942, in the emulator: numbers, matrix instructions, every byte of the
result once.
"""

import pytest

from benchmarks.research.tuning_tables import SHARED_MEMORY
from hip_ops.ops.grouped_product.configs import candidates
from hip_ops.runtime.build import shipped_folder
from tests.gfx942.budgets import resources
from tests.gfx942.emulator import Device
from tests.gfx942.inner_loop import inner_loop
from tests.gfx942.toolchain import ARCH
from tests.gfx942.triton_cases import grouped_product
from tests.hip_ops.grouped_cases import Grouped, check_outer, check_rows
from tests.hip_ops.grouped_device import GroupedOnDevice, lds_time

DEPTH = {"gfx942": 8, "gfx950": 16}[ARCH]  # of a matrix instruction
UNEVEN = Grouped((0, 3, 0, 37, 5), 48, 40)
CASES = [UNEVEN, Grouped((33, 1), 32, 64, "fp16", padding_rows=0), Grouped((5, 6), 35, 33, "bf16", pad=3)]
FLAGGED = [
    pytest.param(case, flag, marks=() if flag or case is CASES[1] else pytest.mark.slow, id=f"{case}-{flag}")
    for case in CASES
    for flag in (False, True)
]


@pytest.mark.first_cases(2)
@pytest.mark.parametrize("case, flag", FLAGGED)
def test_numbers(case, flag):
    on_device = GroupedOnDevice()
    check_rows(on_device, case, flag)
    check_outer(on_device, case, flag)


@pytest.mark.parametrize("schedule", ["serial", "reverse"])
def test_other_schedules(schedule):
    check_rows(GroupedOnDevice(Device(schedule)), UNEVEN, True)
    check_outer(GroupedOnDevice(Device(schedule)), UNEVEN, True)


def test_without_rows():
    nothing = Grouped((0,) * 5, UNEVEN.k, UNEVEN.n)
    check_rows(GroupedOnDevice(), nothing, True)
    for accumulate in (False, True):
        check_outer(GroupedOnDevice(), nothing, accumulate)


def test_every_result_is_written_once_and_products_use_matrix_units():
    case, on_device = Grouped((40, 24), 32, 64, padding_rows=9), GroupedOnDevice()
    check_rows(on_device, case, True)
    tiles = 2 + 1  # of 32 rows
    assert on_device.counters.mfma == tiles * 2 * (32 * 32 * 32) // (32 * 32 * DEPTH)
    assert on_device.counters.global_store_bytes == case.rows * case.n * 2
    check_outer(on_device, case, True)
    steps = 2 + 1
    assert on_device.counters.mfma == steps * 2 * (32 * 32 * 32) // (32 * 32 * DEPTH)
    assert on_device.counters.global_store_bytes == 2 * case.k * case.n * 4
    assert on_device.counters.atomics == 0


# The tiles that an MI300X runs


CANDIDATES = [
    pytest.param(
        kind,
        each,
        id=f"{kind}-{each.config.block_m}x{each.config.block_n}",
        marks=() if each is several[0] else pytest.mark.slow,
    )
    for kind, several in candidates(ARCH).items()
    for each in several
]


WIDEST_TILES = [pytest.param(kind, each[0], None, id=kind) for kind, each in candidates(ARCH).items()]
OTHERS = [
    pytest.param(
        kind, each, small, id=f"{kind}-{each.config.block_m}x{each.config.block_n}-{small}", marks=pytest.mark.slow
    )
    for kind, several in candidates(ARCH).items()
    for each in several
    for small in (False, True)
]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("kind, candidate, small", WIDEST_TILES + OTHERS)
def test_numbers_of_every_candidate(kind, candidate, small):
    """An expert without rows, rows past a tile's end, columns past a tile's end, fewer rows than a slab. With small
    tensors the code has buffer instructions; with those of training (None) the bytes that the package ships run, as
    in tests/gfx942/test_shipped_objects.py all of them do.
    """
    case = Grouped((0, 270, 0, 5, *[0] * 12), 128, 320)
    for schedule in ("lockstep", "reverse"):
        on_device = GroupedOnDevice(Device(schedule, allow_shifted_waves=True), candidate.config, small=small)
        if kind == "outer":
            check_outer(on_device, case, True)
        else:
            check_rows(on_device, case, kind == "rows_t")
        assert small is not None or on_device.code.path.parent == shipped_folder(ARCH)


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("kind, candidate", CANDIDATES)
def test_the_model_has_the_figures_of_the_compiled_code(kind, candidate):
    compiled = grouped_product(kind, candidate.config)
    found = resources(compiled.path, compiled.name, compiled.shared, compiled.threads)
    loop = inner_loop(compiled.path, compiled.name)
    assert (found.vgpr_spills, found.scratch) == (0, 0) and found.waves_per_simd == 2
    assert found.lds <= SHARED_MEMORY[ARCH]
    assert not loop.named("ds_read_u16") and not loop.named("scratch")
    assert loop.other_slots * 256 / loop.mfma_passes <= candidate.other_slots
    assert lds_time(kind, candidate.config) * 256 == pytest.approx(candidate.lds, abs=0.5)
