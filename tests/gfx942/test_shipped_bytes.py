# SPDX-License-Identifier: Apache-2.0
"""Test that the library which the package ships holds the code objects that the emulator and the budgets see, and that
a new build has the same bytes."""

import shutil

import pytest

from hip_ops.runtime.build import LIBRARY, PACKAGE, kernel_sources, shipped_folder
from tests.gfx942 import wait_states
from tests.gfx942.emulator.code_object import open_code_object
from tests.gfx942.toolchain import ARCH
from tests.gfx942.toolchain import code_objects as compiled_objects
from tools import ship
from tools.ship import code_objects, differences

SHIPPED = shipped_folder(ARCH)


def test_the_shipped_device_code_is_what_the_tests_run():
    sources = kernel_sources()
    tested = {source.stem: path for source, path in zip(sources, compiled_objects(sources), strict=True)}
    assert not open_code_object(tested["abi"]).kernels
    expected = [path.read_bytes() for name, path in tested.items() if name != "abi"]
    shipped = code_objects(SHIPPED / LIBRARY)
    assert [len(code) for code in shipped] == [len(code) for code in expected]
    assert shipped == expected, "run `python -m tools.ship`"


def test_the_shipped_library_lacks_no_wait_states(require_tool):
    require_tool("llvm-objdump-19")
    assert wait_states.scan(SHIPPED / LIBRARY) == []


def test_a_changed_byte_is_seen(tmp_path):
    copy = shutil.copytree(SHIPPED, tmp_path / ARCH)
    assert differences(copy, SHIPPED) == []
    content = (copy / LIBRARY).read_bytes()
    place = content.index(code_objects(SHIPPED / LIBRARY)[3]) + 5000
    (copy / LIBRARY).write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
    (said,) = differences(copy, SHIPPED)
    all_of_them = len(code_objects(SHIPPED / LIBRARY))
    assert said == f"the bytes differ; 1 of {all_of_them} code objects are not in the shipped library"


def test_check_fails_where_bytes_differ(tmp_path, monkeypatch, capsys):
    """With a copy in place of a build, which takes minutes."""
    monkeypatch.setattr(ship, "build", lambda folder: shutil.copytree(SHIPPED, folder, dirs_exist_ok=True))
    monkeypatch.setattr(ship.triton_objects, "build", lambda folder, target: 0)
    assert ship.main(["--check"]) == 0 and capsys.readouterr().out == "the same bytes\n"
    other = shutil.copytree(SHIPPED, tmp_path / ARCH)
    (other / LIBRARY).write_bytes((SHIPPED / LIBRARY).read_bytes()[:-1])
    monkeypatch.setattr(ship, "shipped_folder", lambda target: tmp_path / target)
    all_of_them = len(code_objects(SHIPPED / LIBRARY))
    assert ship.main(["--check"]) == 1
    assert capsys.readouterr().out.startswith(f"the bytes differ; 0 of {all_of_them} code objects")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_new_build_in_another_folder_has_the_same_bytes(tmp_path):
    """All of the library, host code included."""
    root, output = tmp_path / "another" / "folder", tmp_path / "output"
    shutil.copytree(PACKAGE, root / "hip_ops", ignore=shutil.ignore_patterns("*.py", "shipped"))
    output.mkdir()
    ship.build(output, root)
    assert differences(output, SHIPPED) == []
