# SPDX-License-Identifier: Apache-2.0
"""Test the libraries that the package ships, gfx942's and gfx950's: its sources, its symbols, when it is used, and how it is loaded.

tests/gfx942/test_shipped_bytes.py compares its device code with what the emulator runs.
"""

import ctypes
import json
import os
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest

from hip_ops.__main__ import main
from hip_ops.runtime import build as build_module
from hip_ops.runtime import launchers
from hip_ops.runtime.build import (
    LIBRARY,
    MANIFEST,
    PACKAGE,
    build,
    library_note,
    shipped,
    shipped_folder,
    sources_digest,
)
from hip_ops.runtime.code_objects import objects_note
from hip_ops.runtime.compilers import CompilerNotFound
from tests.hip_ops.cpu_kernels import KERNELS, build_cpu_library

TARGETS = ("gfx942", "gfx950")
FOLDER = shipped_folder("gfx942")
# All that the library takes from the HIP runtime. ROCm 5.2 and ROCm 7.2 export them under the same symbol version, hip_4.2
# (hipamd/src/hip_hcc.map.in in ROCm/clr). hipGetDeviceProperties, for example, has another structure since ROCm 6.
RUNTIME_FUNCTIONS = {
    "hipGetErrorString",
    "hipLaunchKernel",
    "__hipPopCallConfiguration",
    "__hipRegisterFatBinary",
    "__hipRegisterFunction",
    "__hipUnregisterFatBinary",
}
REBUILD = "run `python -m tools.ship` and commit what it writes"


@pytest.fixture(autouse=True)
def default_library(monkeypatch):
    monkeypatch.delenv("HIP_OPS_LIBRARY", raising=False)


@pytest.fixture
def copied(tmp_path, monkeypatch):
    """A copy of the shipped library, which hip_ops then takes for it."""
    monkeypatch.setattr(build_module, "shipped_folder", lambda target: tmp_path / "shipped" / target)
    return shutil.copytree(FOLDER, tmp_path / "shipped" / "gfx942")


@pytest.mark.parametrize("target", TARGETS)
def test_it_was_built_from_these_sources(target):
    folder = shipped_folder(target)
    told = json.loads((folder / MANIFEST).read_text())
    assert told["sources"] == sources_digest(), f"a kernel's source changed: {REBUILD}"
    assert shipped(target) == (folder / LIBRARY, "")
    assert library_note(target) == f"shipped with the package, sha256 {told['sha256']}"


@pytest.mark.parametrize("target", TARGETS)
def test_it_was_built_by_the_commands_of_today(target, require_tool):
    require_tool("clang++-19")
    from tools.ship import manifest

    folder = shipped_folder(target)
    told = json.loads((folder / MANIFEST).read_text())
    assert told == manifest((folder / LIBRARY).read_bytes(), target=target), REBUILD


def too_new(symbols: str) -> list[str]:
    """Versions of symbols that glibc 2.28 or GCC 8's libstdc++ lack; ROCm's images with Ubuntu 22.04 have newer ones."""
    limits = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 25)}
    found = sorted(set(re.findall(r"\b(GLIBC|GLIBCXX)_([\d.]+)", symbols)))
    return [f"{name}_{number}" for name, number in found if tuple(map(int, number.split("."))) > limits[name]]


@pytest.mark.parametrize("target", TARGETS)
def test_it_needs_an_old_glibc_and_names_no_hip_runtime(target, require_tool):
    readelf = require_tool("llvm-readelf-19")
    shown = subprocess.run(
        [readelf, "--dynamic-table", "--version-info", "--dyn-symbols", "--wide", shipped_folder(target) / LIBRARY],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert re.findall(r"Name: (GLIBC\w*)_", shown) and too_new(shown) == []
    assert too_new("Name: GLIBC_2.28 GLIBC_2.34 GLIBCXX_3.4.25 GLIBCXX_3.4.9 GLIBCXX_3.4.26") == [
        "GLIBC_2.34",
        "GLIBCXX_3.4.26",
    ]
    assert re.findall(r"\(NEEDED\)\s+Shared library: \[(.*)\]", shown) == ["libc.so.6"]
    undefined = set(re.findall(r"GLOBAL\s+DEFAULT\s+UND\s+([^@\s]+)$", shown, re.MULTILINE))
    assert undefined == RUNTIME_FUNCTIONS
    assert "RPATH" not in shown and "RUNPATH" not in shown


def test_a_build_from_source_is_requested_and_announced(empty_cache, no_compilers, monkeypatch, capfd):
    assert build("gfx942") == FOLDER / LIBRARY and capfd.readouterr().err == "", "no compiler is needed"
    for target, library, told in (
        ("gfx942", "source", "HIP_OPS_LIBRARY=source, so the verified library is not used"),
        ("gfx950", "source", "HIP_OPS_LIBRARY=source, so the verified library is not used"),
        ("gfx90a", "", "no library is shipped for gfx90a, and its kernels are unverified"),
        ("gfx90a", "source", "no library is shipped for gfx90a, and its kernels are unverified"),
    ):
        monkeypatch.setenv("HIP_OPS_LIBRARY", library)
        with pytest.raises(CompilerNotFound):
            build(target)
        assert capfd.readouterr().err == f"hip_ops: the {target} kernels are built from source: {told}\n"
        assert library_note(target) == f"built from source: {told}"
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(CompilerNotFound):
        build("gfx90a")
    assert capfd.readouterr().err == "", "one line a machine"
    monkeypatch.setenv("HIP_OPS_LIBRARY", "hipcc")
    with pytest.raises(
        ValueError, match="HIP_OPS_LIBRARY=hipcc: no such library. Allowed: shipped, source. Fix: unset"
    ):
        build("gfx942")


def test_force_builds_it_on_this_machine(empty_cache, no_compilers, capfd):
    with pytest.raises(CompilerNotFound):
        build("gfx942", force=True)
    assert "--force; runs use the shipped library unless HIP_OPS_LIBRARY=source" in capfd.readouterr().err


def test_changed_sources_are_built(tmp_path):
    changed = shutil.copytree(PACKAGE, tmp_path / "hip_ops", ignore=shutil.ignore_patterns("*.py", "shipped"))
    assert shipped("gfx942", sources=changed) == (FOLDER / LIBRARY, "")
    header = changed / "runtime" / "csrc" / "portable_hip.h"
    header.write_text(header.read_text() + "\n")
    build_module._unusable.cache_clear()
    assert shipped("gfx942", sources=changed) == (
        None,
        "the sources are not those of the shipped library, so the kernels are unverified",
    )


def test_a_damaged_library_is_not_used(copied):
    assert shipped("gfx942")[0] == copied / LIBRARY
    content = (copied / LIBRARY).read_bytes()
    (copied / LIBRARY).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    build_module._unusable.cache_clear()
    library, why_not = shipped("gfx942")
    assert library is None and f"the shipped library {copied / LIBRARY} is damaged" in why_not


def test_info_names_it(nothing_selected, capsys, monkeypatch):
    monkeypatch.setattr("hip_ops.__main__.all_operators", lambda: [])
    monkeypatch.setattr("hip_ops.__main__.devices", lambda: [])
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "built from source" not in "".join(map(library_note, TARGETS))
    assert all(f"  {target}: {library_note(target)}\n" in out for target in TARGETS)
    assert "  gfx90a: built from source: no library is shipped for gfx90a, and its kernels are unverified" in out
    assert f"  gfx942: {objects_note('gfx942')}\n" in out


def test_a_file_system_without_execution(monkeypatch, require_tool):
    """A library there is loaded from memory: the loader refuses to map the file."""
    require_tool("g++")
    library = build_cpu_library(KERNELS / "portable.hip")
    assert launchers.loadable(library) == str(library)
    monkeypatch.setattr(launchers.os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC | os.ST_RDONLY))
    names = [launchers.loadable(library) for _ in range(2)]
    assert len({*names}) == 2 and all(re.fullmatch(r"/proc/self/fd/\d+", name) for name in names)
    assert ctypes.CDLL(names[0]).ho_abi_version() == 1
    mapped = [line for line in open("/proc/self/maps") if f"/memfd:{library.name}" in line]
    assert any(" r-xp " in line for line in mapped)
