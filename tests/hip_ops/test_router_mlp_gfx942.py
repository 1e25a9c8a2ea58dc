# SPDX-License-Identifier: Apache-2.0
"""Triton's kernels of the router, compiled for gfx942, in the emulator: numbers in bf16, matrix instructions, what is
written.
"""

import pytest
import torch

from hip_ops.runtime.build import shipped_folder
from tests.gfx942.emulator import Device
from tests.gfx942.toolchain import ARCH
from tests.hip_ops.router_cases import Router, check_backward, check_forward
from tests.hip_ops.router_device import RouterOnDevice

BF16 = torch.bfloat16
WIDE = Router(33, 64, 17, BF16)  # two parts of a matrix, a program of one row
# ZAYA1's widths and choice: several programs, a tail. The bytes that the package ships run.
ZAYA1 = Router(70, 256, 17, BF16, forced=False)
SHORT = Router(33, 256, 17, BF16, forced=False)
OF_74B = Router(70, 256, 25, BF16, forced=False)
CASES = [
    ZAYA1,
    WIDE,
    Router(32, 32, 5, BF16, averaged=False, forced=False, unweighted=False, uses_state=False),
    OF_74B,
    pytest.param(Router(1, 32, 33, BF16), marks=pytest.mark.slow),
    pytest.param(Router(40, 256, 17, BF16), marks=pytest.mark.slow),
]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_numbers(case):
    for check in (check_forward, check_backward):
        on_device = RouterOnDevice()
        check(on_device, case)
        shipped = {code.path.parent == shipped_folder(ARCH) for code in on_device.codes.values()}
        assert shipped == {case.width == 256}, "the width of all recipes"


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("schedule", ["serial", "reverse"])
@pytest.mark.parametrize("case", [SHORT, WIDE, ZAYA1], ids=str)
def test_other_schedules(case, schedule):
    check_forward(RouterOnDevice(Device(schedule)), case)
    check_backward(RouterOnDevice(Device(schedule)), case)


def test_products_use_matrix_units_and_sums_no_atomics():
    on_device = RouterOnDevice()
    for check in (check_forward, check_backward):
        check(on_device, SHORT)
        assert on_device.counters.mfma and on_device.counters.atomics == 0
