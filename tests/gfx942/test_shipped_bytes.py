# SPDX-License-Identifier: Apache-2.0
"""Test that a new build has the bytes of the libraries that the package ships, which the emulator and the budgets see.
Fast tests compile three of gfx942's sources, and none for gfx950.
"""

import shutil

import pytest

from hip_ops.runtime.build import LIBRARY, PACKAGE, kernel_sources, shipped_folder
from hip_ops.runtime.hazards import code_objects
from tests.gfx942 import listing, toolchain, wait_states
from tests.gfx942.emulator.code_object import open_code_object
from tests.gfx942.toolchain import COMPILED, TARGETS, WITHOUT_KERNELS, shipped_object
from tools import ship
from tools.ship import differences

SHIPPED = shipped_folder("gfx942")


def device_code(folder):
    return list(code_objects((folder / LIBRARY).read_bytes()))


@pytest.mark.skipif(toolchain.ARCH != "gfx942", reason="gfx950's compiler is another one")
@pytest.mark.parametrize("stems", [COMPILED, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"])
def test_the_shipped_device_code_is_that_of_a_new_compilation(stems):
    """test_shipped.py shows that the library is of these sources, so the emulator runs its objects."""
    sources = [path for path in kernel_sources() if not stems or path.stem in stems]
    new = {path.stem: made for path, made in zip(sources, toolchain.compiled_objects(sources), strict=True)}
    assert stems or not open_code_object(new.pop(WITHOUT_KERNELS)).kernels
    shipped = {stem: shipped_object(stem, "gfx942") for stem in new}
    assert {stem: path.read_bytes() for stem, path in new.items()} == {
        stem: path.read_bytes() for stem, path in shipped.items()
    }, "run `python -m tools.ship`"
    assert stems or [path.read_bytes() for path in shipped.values()] == device_code(SHIPPED)


@pytest.mark.parametrize("target", ["gfx942", pytest.param("gfx950", marks=pytest.mark.slow)])
def test_the_shipped_library_lacks_no_wait_states(target, require_tool):
    require_tool("llvm-objdump-19")
    assert wait_states.scan(shipped_folder(target) / LIBRARY) == []


@pytest.mark.parametrize("sources", ["cca_prologue", pytest.param("", marks=pytest.mark.slow)], ids=["one", "all"])
def test_gfx950_is_read_as_llvm_writes_it(sources):
    """llvm-objdump 19 does not know gfx950: each of its own instructions gets the bytes that it was read from when the
    LLVM of the pinned Triton assembles it.
    """
    pytest.importorskip("triton")
    names, lines = set(), 0
    for source in [sources] if sources else [path.stem for path in kernel_sources() if path.stem != WITHOUT_KERNELS]:
        for line, words, given in listing.reassembled(listing.listing(shipped_object(source, "gfx950"))):
            assert words == given, line
            names.add(line.split()[0])
            lines += 1
    assert names >= {"v_mfma_f32_32x32x16_bf16", "v_bitop3_b32"} and lines > 20
    assert sources or (lines > 200 and names >= {"v_mfma_f32_32x32x16_f16", "v_bitop3_b16"})


@pytest.mark.parametrize("target", TARGETS)
def test_a_changed_byte_is_seen(tmp_path, target):
    shipped = shipped_folder(target)
    copy = shutil.copytree(shipped, tmp_path / target)
    assert differences(copy, shipped) == []
    content = (copy / LIBRARY).read_bytes()
    place = content.index(device_code(shipped)[3]) + 5000
    (copy / LIBRARY).write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
    text = f"the bytes differ; 1 of {len(device_code(shipped))} code objects are not in the shipped library"
    assert differences(copy, shipped) == [text]


def test_check_fails_where_bytes_differ(tmp_path, monkeypatch, capsys):
    """With a copy in place of a build, which takes minutes."""

    def copied(folder, target):
        shutil.copytree(shipped_folder(target), folder, dirs_exist_ok=True)

    monkeypatch.setattr(ship, "build", copied)
    monkeypatch.setattr(ship.triton_objects, "build", lambda folder, target: 0)
    assert ship.main(["--check"]) == 0
    assert capsys.readouterr().out == "gfx942: the same bytes\ngfx950: the same bytes\n"
    other = shutil.copytree(SHIPPED, tmp_path / "gfx942")
    (other / LIBRARY).write_bytes((SHIPPED / LIBRARY).read_bytes()[:-1])
    monkeypatch.setattr(ship, "shipped_folder", lambda target: tmp_path / target)
    all_of_them = len(device_code(SHIPPED))
    assert ship.main(["--check", "gfx942"]) == 1
    assert capsys.readouterr().out.startswith(f"gfx942: the bytes differ; 0 of {all_of_them} code objects")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", TARGETS)
def test_a_new_build_in_another_folder_has_the_same_bytes(tmp_path, target):
    """All of the library, host code included, and the Triton objects. gfx950's is skipped without the package of its
    compiler.
    """
    root, output = tmp_path / "another" / "folder", tmp_path / "output"
    shutil.copytree(PACKAGE, root / "hip_ops", ignore=shutil.ignore_patterns("*.py", "shipped"))
    output.mkdir()
    ship.build(output, root, target)
    ship.triton_objects.build(output, target)
    assert differences(output, shipped_folder(target)) == []
