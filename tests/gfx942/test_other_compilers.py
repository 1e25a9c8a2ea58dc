# SPDX-License-Identifier: Apache-2.0
"""The kernels as other compilers than plain clang 19 make them: with hipcc's additional flags, where users build with
hipcc, and by clang 22. No kernel spills registers or lacks wait states, and those that differ run in the emulator.

hipcc's flags are tested in this file and not passed in this project's own builds: they change with hipcc's version, and
a build by hipcc adds them anyway.
"""

import pytest

from hip_ops.runtime.build import kernel_sources
from tests.gfx942 import wait_states
from tests.gfx942.budgets import REGISTERS_A_LANE, resources
from tests.gfx942.emulator import Device
from tests.gfx942.emulator.code_object import open_code_object
from tests.gfx942.toolchain import code_object, hipcc_object, newer_object
from tests.hip_ops import cca_prologue_cases, cca_prologue_device, rms_norm_cases, rms_norm_device
from tests.hip_ops.expert_path_cases import MIXES, check_sort, expert_ids
from tests.hip_ops.expert_path_device import HipOnDevice
from tests.hip_ops.product_cases import ROUNDED_ONCE, symmetric_case
from tests.hip_ops.product_device import run_symmetric

pytestmark = pytest.mark.slow
COMPILERS = {"hipcc": hipcc_object, "clang22": newer_object}
MOST_REGISTERS = {f"ho_cca_prologue_backward_{name}": REGISTERS_A_LANE // 2 for name in ("weights", "input")}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("source", [path.stem for path in kernel_sources()])
def test_no_spills_and_no_missing_wait_states(source, compiler):
    path = COMPILERS[compiler](source)
    assert [str(one) for one in wait_states.scan(path)] == []
    for name, info in open_code_object(path).kernels.items():
        found = resources(path, name)
        assert (found.scratch, found.vgpr_spills) == (0, 0), name
        assert info.total_vgprs <= MOST_REGISTERS.get(name, REGISTERS_A_LANE), name


def test_the_registers_of_clang_19():
    kernels = open_code_object(code_object("cca_prologue_backward")).kernels
    assert all(kernels[name].total_vgprs <= most for name, most in MOST_REGISTERS.items())


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("schedule", ["lockstep", "reverse"])
def test_cca_prologue(compiler, schedule):
    case = cca_prologue_cases.Case(20, 2, 2, 1, halo=True, document=6, zero=True)
    cca_prologue_cases.check(cca_prologue_device.Emulated(Device(schedule), objects=COMPILERS[compiler]), case)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("schedule", ["lockstep", "reverse"])
def test_rms_norm(compiler, schedule):
    for case in (rms_norm_cases.Case(True, 5, 2048), rms_norm_cases.Case(True, 3, 45, pad=1)):
        emulated = rms_norm_device.Emulated(Device(schedule), objects=COMPILERS[compiler])
        rms_norm_cases.check(emulated.implementation, case)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("schedule", ["lockstep", "reverse"])
def test_expert_sort(compiler, schedule):
    path = HipOnDevice(Device(schedule), objects=COMPILERS[compiler])
    for mix in MIXES[:3]:
        check_sort(path, expert_ids(mix, 700, 16), 16)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("schedule", ["lockstep", "reverse"])
@pytest.mark.parametrize("side", [128, 256])
def test_symmetric_product(compiler, schedule, side):
    case = symmetric_case(1, side + 8, 168, "bf16")
    path = COMPILERS[compiler]("symmetric_product")
    got, _ = run_symmetric(Device(schedule=schedule), f"ho_symmetric_bf16_{side}", case, path)
    assert (got == got.mT).all() and case.worst_ulps(got) <= ROUNDED_ONCE
