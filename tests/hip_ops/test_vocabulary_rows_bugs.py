# SPDX-License-Identifier: Apache-2.0
"""Each known mistake, put into a copy of the source of the kernels on rows of logits, must make a comparison fail."""

import shutil

import pytest

import hip_ops.runtime.launchers
from hip_ops.ops.linear_cross_entropy import hip as vocabulary_rows
from tests.gfx942.emulator import Device
from tests.gfx942.emulator.faults import OutOfBounds
from tests.gfx942.toolchain import code_object
from tests.hip_ops import vocabulary_rows_bugs as bugs
from tests.hip_ops.cpu_kernels import SCHEDULES
from tests.hip_ops.injected_bug import cpu_copy, write_source
from tests.hip_ops.kernel_files import kernel_source
from tests.hip_ops.vocabulary_rows_cases import Logits, check
from tests.hip_ops.vocabulary_rows_device import HipRows

FAST = "total_not_rescaled"  # each costs a build of the source


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == FAST else pytest.mark.slow) for name in bugs.BUGS]
)
def test_each_bug_is_caught(tmp_path, monkeypatch, name):
    copy = cpu_copy(tmp_path, bugs.BUGS[name], "vocabulary_rows")
    monkeypatch.setattr(hip_ops.runtime.launchers, "library", lambda target: copy)
    monkeypatch.setenv("HO_CPU_SCHEDULE", SCHEDULES[-1])  # no kernel has a barrier: any order shows each bug
    with pytest.raises(AssertionError, match="are wrong"):
        bugs.shows(vocabulary_rows)


def test_the_right_source_passes():
    bugs.shows(vocabulary_rows)


def test_one_element_too_many_is_out_of_bounds(tmp_path):
    source = write_source(tmp_path, bugs.ONE_TOO_MANY, "vocabulary_rows")
    shutil.copy(kernel_source("portable.h"), tmp_path)
    with pytest.raises(OutOfBounds):
        check(HipRows(Device("lockstep"), objects=lambda name: code_object(source)), Logits(2, 64))
