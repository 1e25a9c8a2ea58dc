# SPDX-License-Identifier: Apache-2.0
"""Test that a process has one HIP runtime, that of torch, and that the shipped library is bound to it."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from hip_ops.runtime.launchers import linked_major, major_version, mapped_runtimes, the_runtime
from tests.hip_ops.torch_process import run_with_torch

ROCM_6 = "/opt/rocm-6.4.1/lib/libamdhip64.so.6.4.60401"
ROCM_7 = "/opt/rocm-7.1.0/lib/libamdhip64.so.7.1.70100"
LINE = "7f3a{:04x}000-7f3b{:04x}000 r-xp 00000000 08:01 1835 {}\n"
OTHERS = LINE.format(90, 90, "/usr/lib/libamdhip64.so.d/notes.txt") + "7ffd8f1c000-7ffd8f3d000 rw-p 0 00:00 0 [stack]\n"
DEBIAN = Path("/usr/lib/x86_64-linux-gnu/libamdhip64.so.5")


def maps(*runtimes: str) -> str:
    """Text of /proc/self/maps in which each runtime has two mappings."""
    lines = [LINE.format(2 * i + part, 2 * i + part, path) for i, path in enumerate(runtimes) for part in (0, 1)]
    return "".join(lines) + OTHERS


@pytest.mark.parametrize(
    ("hip", "linked", "major"),
    [
        ("6.4.43484", None, 6),
        ("7.2.53211", None, 7),
        ("7.15.26301", 7, 7),
        ("7.16.26341", 7, 7),  # ROCm 10
        ("10.0.0", 7, 7),  # a torch that wrote ROCm's version into torch.version.hip
        ("8.0.1", None, 8),
    ],
)
def test_the_runtime_of_each_rocm(hip, linked, major):
    path = f"/opt/rocm/lib/libamdhip64.so.{major}"
    assert the_runtime(hip, maps(path), linked) == Path(path)
    with pytest.raises(ValueError, match=f"HIP {major + 1}, not torch's version.*of major version {major}"):
        the_runtime(hip, maps(f"/opt/rocm/lib/libamdhip64.so.{major + 1}"), linked)


def test_rocm_10_without_the_linked_version():
    """Nothing tells HIP's version, so the runtime is refused with the number that torch gives."""
    with pytest.raises(ValueError, match=r"HIP 7, not torch's version.*torch was built for HIP 10\.0\.0"):
        the_runtime("10.0.0", maps(ROCM_7), None)


def test_the_version_with_which_torch_was_linked(tmp_path, monkeypatch, require_tool):
    require_tool("g++")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    lib = tmp_path / "torch" / "lib"
    assert linked_major() is None, "a torch for CPUs"
    runtime = shared_object(tmp_path / "rocm" / "libamdhip64.so.7", "libamdhip64.so.7")
    c10 = shared_object(lib / "libc10_hip.so", "libc10_hip.so", runtime)
    assert linked_major() == 7, "the name that c10 needs"
    shared_object(lib / "libamdhip64.so", "libamdhip64.so.6")
    assert linked_major() == 6 and c10.is_file(), "a runtime in torch's own folder"


def test_one_runtime_of_torchs_version():
    assert mapped_runtimes(maps(ROCM_6, ROCM_7)) == [Path(ROCM_6), Path(ROCM_7)]
    assert the_runtime("7.1.25424-4179531dcd", maps(ROCM_7)) == Path(ROCM_7)
    in_a_wheel = "/usr/lib/python3/site packages/torch/lib/libamdhip64.so"
    assert the_runtime("7.1", maps(in_a_wheel)) == Path(in_a_wheel), "no number in the name, and no such file"


@pytest.mark.parametrize(
    "runtimes, told",
    [
        ([ROCM_6, ROCM_7], f"{ROCM_6} (HIP 6, not torch's version) and {ROCM_7} (HIP 7, torch's version)"),
        ([ROCM_6], f"{ROCM_6} (HIP 6, not torch's version)"),
        ([ROCM_7, ROCM_7 + "-copy"], f"{ROCM_7} (HIP 7, torch's version) and {ROCM_7}-copy (HIP 7, torch's version)"),
        ([], "no HIP runtime"),
    ],
)
def test_any_other_is_an_error_that_says_which_is_which(runtimes, told):
    said = (
        f"libamdhip64: this process has mapped {told}, and torch was built for HIP 7.1.2. Allowed: one HIP runtime, of "
        "major version 7. Fix: let LD_LIBRARY_PATH and LD_PRELOAD name only the ROCm of this torch, and reinstall for "
    )
    with pytest.raises(ValueError, match=re.escape(said)):
        the_runtime("7.1.2", maps(*runtimes))


def shared_object(file: Path, soname: str, *needs: Path) -> Path:
    """A library that exports nothing: its names are what counts."""
    file.parent.mkdir(parents=True, exist_ok=True)
    command = ["g++", "-shared", "-x", "c++", "/dev/null", "-x", "none", f"-Wl,-soname,{soname}", "-Wl,--no-as-needed"]
    rpath = [f"-Wl,-rpath,{each.parent}" for each in needs]
    subprocess.run([*command, *map(str, needs), *rpath, "-o", str(file)], check=True)
    return file


def run(program: str, *arguments, **environment: str) -> str:
    """Output of a process of its own: what it maps stays out of the tests' process."""
    done = run_with_torch(program, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


MAPS = """
import ctypes, sys
from hip_ops.runtime.launchers import own_maps, the_runtime
for path in sys.argv[1:]:
    ctypes.CDLL(path)
    try:
        print(the_runtime("7.1", own_maps()))
    except ValueError as error:
        print(error)
"""


def test_two_runtimes_that_are_mapped(tmp_path, require_tool):
    require_tool("g++")
    seven = shared_object(tmp_path / "torch" / "lib" / "libamdhip64.so", "libamdhip64.so.7")
    six = shared_object(tmp_path / "rocm" / "libamdhip64.so.6", "libamdhip64.so.6")
    assert [major_version(each) for each in (seven, six)] == [7, 6]
    one, two = run(MAPS, seven, six).splitlines()
    assert one == str(seven)
    assert f"{seven} (HIP 7, torch's version)" in two and f"{six} (HIP 6, not torch's version)" in two


LOADS = """
import sys, torch
from pathlib import Path
from hip_ops.runtime import launchers
import ctypes
ctypes.CDLL(sys.argv[1])
torch.version.hip = "7.1"
launchers.build = lambda target: Path(sys.argv[2])
launchers.load = lambda path: ctypes.CDLL(str(path))
for _ in range(2):
    try:
        launchers.library("gfx950")
    except ValueError as error:
        print(error)
"""


@pytest.mark.slow
def test_a_library_that_brings_another_runtime(tmp_path, require_tool):
    """As hipcc of a host's ROCm 6 links it, with a torch with ROCm 7."""
    require_tool("g++")
    seven = shared_object(tmp_path / "torch" / "libamdhip64.so.7", "libamdhip64.so.7")
    six = shared_object(tmp_path / "rocm" / "libamdhip64.so.6", "libamdhip64.so.6")
    ours = shared_object(tmp_path / "libhip_ops.so", "libhip_ops.so", six)
    first, second = run(LOADS, seven, ours).splitlines()
    assert first == second
    assert f"{seven} (HIP 7, torch's version)" in first and f"{six} (HIP 6, not torch's version)" in first


FALLS_THROUGH = """
import pytest
from tests.hip_ops.fake_gpu import GPU, FakeGpu
FakeGpu(pytest.MonkeyPatch(), hip="7.1")
from hip_ops.ops.expert_permutation import _gather
from hip_ops.runtime import launchers
launchers.target_of = lambda device: "gfx942"
print(_gather.choice(GPU))
print(_gather.results[GPU, "hip"])
"""


def test_a_process_without_a_runtime(tmp_path):
    """The real operator, loader and library: HIP cannot be bound, Triton finds no device, the compiled version runs."""
    choice, why = run(FALLS_THROUGH, PATH=str(tmp_path), HIP_OPS_CACHE=str(tmp_path)).splitlines()
    assert choice.startswith("compiled (kernels=auto; no hip: it failed its self-check: ValueError: libamdhip64: this ")
    assert "; no triton: it failed its self-check: " in choice
    assert "this process has mapped no HIP runtime, and torch was built for HIP 7.1. Allowed: one HIP runtime" in why


BINDS = """
import ctypes, sys, torch
from hip_ops.runtime import launchers
from hip_ops.runtime.build import shipped
from hip_ops.runtime.launchers import load
try:
    load(shipped("gfx942")[0])
except OSError as error:
    print(error)
ctypes.CDLL(sys.argv[1])
torch.version.hip = "5.2.21153"
loaded = launchers.library("gfx942")
print(loaded.ho_abi_version(), loaded.ho_error_string(100).decode())
print(loaded.ho_muon_momentum.argtypes[-1].__name__, loaded.ho_gather_rows.restype.__name__)
codes = [loaded.ho_weighted_swiglu(None, None, None, None, 1, 8, 16, 1, 2, 4, 1, 1, None) for _ in range(2)]
print([loaded.ho_error_string(code).decode() for code in codes])
print(sum("libamdhip64" in line and " r-xp " in line for line in open("/proc/self/maps")))
"""


def test_the_shipped_library_is_bound_to_the_mapped_runtime(tmp_path):
    """The runtime of Debian's ROCm 5.2 stands for torch's: without a device its functions answer with error codes. No
    compiler is on PATH and the cache cannot be written."""
    if not DEBIAN.is_file():
        assert os.environ.get("CI") != "true", f"{DEBIAN} is missing; tools/apt-packages.txt names the package"
        pytest.skip(f"{DEBIAN} is missing; tools/apt-packages.txt names the package")
    (tmp_path / "file").write_text("")
    out = run(BINDS, DEBIAN, PATH=str(tmp_path), HIP_OPS_CACHE=str(tmp_path / "file"), HIP_OPS_LIBRARY="shipped")
    missing, version, types, launches, executable = out.splitlines()
    assert "undefined symbol: hip" in missing
    assert version == "1 hipErrorNoDevice" and types == "c_void_p c_int"
    assert launches == "['hipErrorInvalidDevice', 'hipErrorInvalidDevice']" and executable == "1"
