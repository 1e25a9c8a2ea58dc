# SPDX-License-Identifier: Apache-2.0
"""Each known mistake, put into a copy of the expert path's sources, must make a comparison fail."""

import shutil

import pytest

import hip_ops.runtime.launchers
from hip_ops.ops.expert_permutation import hip as expert_permutation
from hip_ops.ops.weighted_swiglu import hip as weighted_swiglu
from tests.gfx942.emulator import Device
from tests.gfx942.emulator.faults import EmulatorFault, LdsRace, OutOfBounds, UninitialisedLds
from tests.gfx942.toolchain import code_object
from tests.hip_ops import expert_path_bugs as bugs
from tests.hip_ops.cpu_kernels import SCHEDULES
from tests.hip_ops.expert_path_cases import Rows, check_rows
from tests.hip_ops.expert_path_device import HipOnDevice
from tests.hip_ops.injected_bug import Bug, cpu_copy, write_source
from tests.hip_ops.kernel_files import kernel_source

MODULES = {"expert_sort": expert_permutation, "expert_rows": expert_permutation, "weighted_swiglu": weighted_swiglu}


def emulated(folder, bug: Bug) -> HipOnDevice:
    source = write_source(folder, bug, bug.case)
    shutil.copy(kernel_source("portable.h"), folder)
    return HipOnDevice(Device("lockstep"), objects=lambda name: code_object(source))


# Each costs a build of a source.
FAST = ("lost_tail", "wrong_derivative", "lost_barrier_after_counting", "not_stable")


def named(sort: bool):
    """Parameters of a test: the bugs of the sort, or all others."""
    names = [name for name, bug in bugs.BUGS.items() if (bug.case == "expert_sort") == sort]
    return [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in names]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", named(sort=False))
def test_each_bug_is_caught(tmp_path, monkeypatch, name):
    bug = bugs.BUGS[name]
    copy = cpu_copy(tmp_path, bug, bug.case)
    monkeypatch.setattr(hip_ops.runtime.launchers, "library", lambda target: copy)
    for schedule in SCHEDULES:  # no kernel on rows has a barrier: each schedule shows each bug
        monkeypatch.setenv("HO_CPU_SCHEDULE", schedule)
        with pytest.raises(AssertionError, match="are wrong"):
            bugs.CHECKS[bug.case](MODULES[bug.case])


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", named(sort=True))
def test_each_bug_of_the_sort_is_caught(tmp_path, name):
    """Runs the compiled gfx942 code, because wrong rows are wrong addresses, which would crash the process on the
    CPU.
    """
    on_device = emulated(tmp_path, bugs.BUGS[name])
    with pytest.raises((AssertionError, EmulatorFault)) as caught:
        bugs.sorts(on_device)
    if "barrier" in name:
        assert isinstance(caught.value, (LdsRace, UninitialisedLds))


@pytest.mark.parametrize("source", MODULES)
def test_the_right_sources_pass(source):
    bugs.CHECKS[source](MODULES[source])


def test_one_element_too_many_is_out_of_bounds(tmp_path):
    with pytest.raises(OutOfBounds):
        check_rows(emulated(tmp_path, bugs.ONE_TOO_MANY), Rows(5, 64))
