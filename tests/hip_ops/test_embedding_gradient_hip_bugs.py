# SPDX-License-Identifier: Apache-2.0
"""Each known mistake, put into a copy of the source of the kernels that add rows by their ids, must make a
comparison fail.
"""

import shutil

import pytest

import hip_ops.runtime.launchers
from hip_ops.ops.embedding_gradient import hip as embedding_gradient
from tests.gfx942.emulator import Device
from tests.gfx942.emulator.faults import OutOfBounds
from tests.gfx942.toolchain import code_object
from tests.hip_ops import embedding_gradient_hip_bugs as bugs
from tests.hip_ops.cpu_kernels import SCHEDULES
from tests.hip_ops.embedding_gradient_cases import Rows, check
from tests.hip_ops.embedding_gradient_device import HipRows
from tests.hip_ops.injected_bug import cpu_copy, write_source
from tests.hip_ops.kernel_files import kernel_source

FAST = "joined_by_every_run"  # each costs a build of the source


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == FAST else pytest.mark.slow) for name in bugs.BUGS]
)
def test_each_bug_is_caught(tmp_path, monkeypatch, name):
    copy = cpu_copy(tmp_path, bugs.BUGS[name], "embedding_gradient")
    monkeypatch.setattr(hip_ops.runtime.launchers, "library", lambda target: copy)
    monkeypatch.setenv("HO_CPU_SCHEDULE", SCHEDULES[-1])  # no kernel has a barrier: any order shows each bug
    with pytest.raises(AssertionError, match="off by"):
        bugs.shows(embedding_gradient)


def test_the_right_source_passes():
    bugs.shows(embedding_gradient)


@pytest.mark.parametrize("bug", [bugs.ONE_TOO_MANY, bugs.ONE_COLUMN_TOO_MANY], ids=["id", "column"])
def test_one_too_many_is_out_of_bounds(tmp_path, bug):
    source = write_source(tmp_path, bug, "embedding_gradient")
    shutil.copy(kernel_source("portable.h"), tmp_path)
    with pytest.raises(OutOfBounds):
        check(HipRows(Device("lockstep"), objects=lambda name: code_object(source)), Rows(33, 9, 45))
