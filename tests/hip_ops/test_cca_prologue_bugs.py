# SPDX-License-Identifier: Apache-2.0
"""Each known mistake, put into a copy of the CCA prologue's sources, must make a comparison fail."""

import pytest

import hip_ops.runtime.launchers
from hip_ops.ops.cca_prologue import hip as hip_kernels
from hip_ops.runtime.launchers import load
from tests.gfx942.emulator import Device
from tests.gfx942.emulator.faults import EmulatorFault
from tests.gfx942.toolchain import code_object
from tests.hip_ops import cca_prologue_bugs as bugs
from tests.hip_ops.cca_prologue_cases import check
from tests.hip_ops.cca_prologue_device import Emulated
from tests.hip_ops.cpu_kernels import SCHEDULES, build_cpu_library, run_python
from tests.hip_ops.kernel_files import kernel_source

# In a process of its own: without a barrier a fiber may read what it likes.
PROGRAM = """
import sys
from pathlib import Path
import hip_ops.runtime.launchers
from hip_ops.ops.cca_prologue import hip as kernels
from hip_ops.runtime.launchers import load
from tests.hip_ops import cca_prologue_bugs as bugs
from tests.hip_ops.cca_prologue_cases import check

library, name, *sources = sys.argv[1:]
loaded = load(Path(library), *map(Path, sources))
for module in (hip_ops.runtime.launchers, kernels):
    module.library = lambda target: loaded
try:
    check(kernels, bugs.BUGS[name].case)
except AssertionError as error:
    print("caught:", str(error)[:300])
else:
    print("passed")
"""


@pytest.mark.slow  # test_cca_prologue.py checks the shipped sources
@pytest.mark.parametrize("case", [bugs.PLAIN, bugs.HALO, bugs.LONG, bugs.ENTRIES], ids=str)
def test_the_copy_without_a_bug_passes(tmp_path, monkeypatch, case):
    sources = bugs.copy(tmp_path)
    loaded = load(build_cpu_library(*sources), *sources, kernel_source("abi.hip"))
    for module in (hip_ops.runtime.launchers, hip_kernels):
        monkeypatch.setattr(module, "library", lambda target: loaded)
    check(hip_kernels, case)


FAST = "gradient_across_a_document"  # each costs a build of the sources


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == FAST else pytest.mark.slow) for name in bugs.BUGS]
)
def test_each_bug_is_caught(tmp_path, name):
    bug = bugs.BUGS[name]
    sources = bugs.copy(tmp_path, bug)
    library = build_cpu_library(*sources)
    caught = []
    for schedule in SCHEDULES if bug.schedule else SCHEDULES[:1]:
        done = run_python(
            PROGRAM, library, name, *sources, kernel_source("abi.hip"), HO_CPU_SCHEDULE=schedule, OMP_NUM_THREADS="1"
        )
        assert "passed" in done.stdout or "caught: " in done.stdout or done.returncode < 0, done.stdout[-3000:]
        caught += [schedule] * ("passed" not in done.stdout)
    assert caught, f"no schedule shows the bug {name}"


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, bug in bugs.BUGS.items() if bug.schedule and bug.file == bugs.FORWARD])
def test_the_emulator_names_a_lost_barrier(tmp_path, name):
    bugs.copy(tmp_path, bugs.BUGS[name])
    emulated = Emulated(Device("lockstep"), objects=lambda source: code_object(tmp_path / f"{source}.hip"))
    with pytest.raises(EmulatorFault, match="LdsRace|UninitialisedLds"):
        check(emulated, bugs.PLAIN)
