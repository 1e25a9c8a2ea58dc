# SPDX-License-Identifier: Apache-2.0
"""Triton's grouped products, compiled for gfx942, in the emulator: numbers, matrix instructions, every byte of the
result once.
"""

import pytest

from tests.gfx942.emulator import Device
from tests.hip_ops.grouped_cases import Grouped, check_outer, check_rows
from tests.hip_ops.grouped_device import GroupedOnDevice

UNEVEN = Grouped((0, 3, 0, 37, 5), 48, 40)
CASES = [UNEVEN, Grouped((33, 1), 32, 64, "fp16", padding_rows=0), Grouped((5, 6), 35, 33, "bf16", pad=3)]
FLAGGED = [
    pytest.param(case, flag, marks=() if flag or case is CASES[1] else pytest.mark.slow, id=f"{case}-{flag}")
    for case in CASES
    for flag in (False, True)
]


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
    assert on_device.counters.mfma == tiles * 2 * (32 * 32 * 32) // (32 * 32 * 8)
    assert on_device.counters.global_store_bytes == case.rows * case.n * 2
    check_outer(on_device, case, True)
    steps = 2 + 1
    assert on_device.counters.mfma == steps * 2 * (32 * 32 * 32) // (32 * 32 * 8)
    assert on_device.counters.global_store_bytes == 2 * case.k * case.n * 4
    assert on_device.counters.atomics == 0
