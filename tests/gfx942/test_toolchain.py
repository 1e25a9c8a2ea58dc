# SPDX-License-Identifier: Apache-2.0
"""Test compilation, caching, and missing tools."""

from pathlib import Path

import pytest

from tests.gfx942 import toolchain
from tests.gfx942.emulator.code_object import CodeObject

# no HIP header: it takes longer to read than all else together
KERNEL = """#include "value.h"
#define KERNEL extern "C" __attribute__((global)) void
KERNEL kernel(int* y) { y[__builtin_amdgcn_workitem_id_x()] = VALUE; }
#ifdef BUG
KERNEL bug(int* y) { y[0] = 1; }
#endif
"""


@pytest.fixture
def source(tmp_path, monkeypatch) -> Path:
    (tmp_path / "value.h").write_text("#define VALUE 7\n")
    path = tmp_path / "small.hip"
    path.write_text(KERNEL)
    return path


def test_products_are_cached_until_something_changes(source):
    first = toolchain.code_object(source)
    assert first.read_bytes()[:4] == b"\x7fELF" and toolchain.code_object(source) == first
    with_bug = toolchain.code_object(source, defines=["BUG"])
    assert with_bug != first and b"bug.kd" in with_bug.read_bytes() and b"bug.kd" not in first.read_bytes()
    (source.parent / "value.h").write_text("#define VALUE 8\n")
    assert toolchain.code_object(source) != first


def test_assembly_and_remarks(source):
    text = toolchain.assembly(source).read_text()
    assert "v_mov_b32_e32" in text and "s_endpgm" in text
    remarks = toolchain.resource_remarks(source)
    assert set(remarks) == {"kernel"} and remarks["kernel"]["Occupancy [waves/SIMD]"] == 8


def test_compile_errors_show_the_message(source):
    source.write_text("not C++")
    with pytest.raises(toolchain.CompileError, match="error:"):
        toolchain.code_object(source)


def test_absent_source():
    with pytest.raises(FileNotFoundError, match="absent.hip"):
        toolchain.code_object("absent")


def test_without_llvm_the_emulator_s_tests_are_skipped(monkeypatch, tmp_path):
    shipped = toolchain.code_object("muon")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", "false")
    with pytest.raises(pytest.skip.Exception, match="llvm-readelf-19 is not on PATH"):
        CodeObject(shipped)
