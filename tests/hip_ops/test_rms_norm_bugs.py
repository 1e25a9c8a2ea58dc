# SPDX-License-Identifier: Apache-2.0
"""Each known mistake, put into a copy of the RMSNorm sources, must make a comparison fail."""

import ctypes
import shutil

import pytest

import hip_ops.runtime.launchers
from hip_ops.ops.rms_norm import hip as hip_kernels
from tests.gfx942.emulator import Device
from tests.gfx942.emulator.faults import EmulatorFault, LdsRace, OutOfBounds, UninitialisedLds
from tests.gfx942.toolchain import code_object
from tests.hip_ops import rms_norm_bugs as bugs
from tests.hip_ops.kernel_files import kernel_source
from tests.hip_ops.rms_norm_cases import check, of_module
from tests.hip_ops.rms_norm_device import Emulated

pytestmark = pytest.mark.slow  # it tests the tests


@pytest.fixture(scope="module")
def copies(tmp_path_factory):
    return ctypes.CDLL(str(bugs.build(tmp_path_factory.mktemp("bugs"))))


@pytest.fixture
def copy(copies, monkeypatch):
    """Makes the HIP version on the CPU run copy `name`."""

    def use(name: str):
        for module in (hip_ops.runtime.launchers, hip_kernels):
            monkeypatch.setattr(module, "library", lambda target: bugs.Renamed(copies, name))

    return use


@pytest.mark.parametrize("case", [bugs.ZAYA, bugs.PLAIN, bugs.ODD, bugs.CENTERED, bugs.ODD_CENTERED], ids=str)
@pytest.mark.parametrize("schedule", ["forward", "reverse", "random:7"])
def test_the_copy_without_a_bug_passes(copy, monkeypatch, schedule, case):
    monkeypatch.setenv("HO_CPU_SCHEDULE", schedule)
    copy(bugs.RIGHT)
    check(of_module(hip_kernels), case)


@pytest.mark.parametrize("name", bugs.BUGS)
def test_each_bug_is_caught(copy, monkeypatch, name):
    caught = []
    copy(name)
    for schedule in ("forward", "reverse", "random:7"):
        monkeypatch.setenv("HO_CPU_SCHEDULE", schedule)
        try:
            check(of_module(hip_kernels), bugs.BUGS[name].case)
        except AssertionError as error:
            assert "elements are wrong" in str(error)
            caught.append(schedule)
    assert caught, f"no schedule shows the bug {name}"
    if "barrier" not in name and "lds" not in name:
        assert len(caught) == 3, f"{name} does not depend on the schedule, but only {caught} show it"


@pytest.mark.parametrize(
    "name, faults", [("lost_barrier", (LdsRace, UninitialisedLds)), ("lost_tail_mask", (OutOfBounds,))]
)
def test_the_emulator_names_the_fault(tmp_path, name, faults):
    """Runs the compiled gfx942 code under the schedule in which a missing barrier does not also change the numbers."""
    for file in bugs.FILES:
        (tmp_path / file).write_text(bugs.source(file, bugs.BUGS[name]))
    shutil.copy(kernel_source("portable.h"), tmp_path)
    emulated = Emulated(Device("lockstep"), objects=lambda source: code_object(tmp_path / f"{source}.hip"))
    with pytest.raises(EmulatorFault) as caught:
        check(emulated.implementation, bugs.BUGS[name].case)
    assert isinstance(caught.value, faults)
