# SPDX-License-Identifier: Apache-2.0
"""Test that compilers, the disassembler, device libraries and amd-smi are searched in every layout of ROCm, and that
the name of torch's ROCm is not that of its HIP.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hip_ops.runtime import hazards, rocm
from hip_ops.runtime.compilers import CompilerNotFound, find_compiler

LAYOUTS = Path(__file__).parent / "rocm_layouts"
ANSWERS = {
    "llvm-objdump": "LLVM version 20.0.0",
    "clang++": "AMD clang version 20.0.0",
    "amdclang++": "clang version 20",
}


@pytest.fixture
def layout(no_compilers, tmp_path, monkeypatch):
    """Lays out the files of a recorded layout; the programs print their version. Returns its folder."""

    def lay_out(name: str, without: str = "") -> Path:
        folder = tmp_path / name
        for line in (LAYOUTS / f"{name}.txt").read_text().splitlines():
            if line.startswith("#") or (without and line.endswith(without)):
                continue
            file = folder / line
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"#!/bin/sh\necho '{ANSWERS.get(file.name, 'HIP version: 7.16.26341')}'\n")
            file.chmod(0o755)
            if file.suffix == ".py":
                file.write_text("")
        return folder

    hazards.objdump.cache_clear()
    yield lay_out
    hazards.objdump.cache_clear()


def site_packages(folder: Path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(folder)
    importlib.invalidate_caches()
    for name in rocm.WHEELS:
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.parametrize(
    ("name", "root"), [("wheels", "_rocm_sdk_devel"), ("folder_7", "."), ("folder_10", "core"), ("named", ".")]
)
def test_every_program_of_a_layout(layout, monkeypatch, name, root):
    folder = layout("folder_7" if name == "named" else name)
    if name == "wheels":
        site_packages(folder, monkeypatch)
    elif name == "named":
        monkeypatch.setenv("ROCM_HOME", str(folder))
    else:
        monkeypatch.setattr(rocm, "DEFAULT_FOLDERS", (str(folder), str(folder / "core")))
    root = folder / root
    assert root in rocm.rocm_roots()
    compiler = find_compiler("gfx942")
    assert (compiler.program, compiler.version) == (str(root / "bin" / "hipcc"), "HIP version: 7.16.26341")
    llvm = root / ("llvm" if (root / "llvm").is_dir() else "lib/llvm") / "bin"
    assert hazards.objdump() == str(llvm / "llvm-objdump")
    assert rocm.find_program("amd-smi") == str(root / "bin" / "amd-smi")
    assert rocm.find_program("no-such-smi") is None


@pytest.mark.parametrize("name", ["wheels", "folder_7", "folder_10"])
def test_clang_with_its_device_libraries_and_runtime(layout, monkeypatch, name):
    folder = layout(name, without="hipcc")
    if name == "wheels":
        site_packages(folder, monkeypatch)
        (folder / "_rocm_sdk_devel" / "bin" / "hipcc").write_text("#!/bin/sh\nexit 1\n")  # one that does not run
    monkeypatch.setattr(rocm, "DEFAULT_FOLDERS", (str(folder), str(folder / "core")))
    compiler = find_compiler("gfx942")
    root = folder / {"wheels": "_rocm_sdk_devel", "folder_7": ".", "folder_10": "core"}[name]
    inside = "amdgcn/bitcode" if name == "folder_7" else "lib/llvm/amdgcn/bitcode"
    assert Path(compiler.program).name == "clang++" and root in Path(compiler.program).parents
    assert f"--rocm-device-lib-path={root / inside}" in compiler.compile_flags
    assert compiler.link_flags[-1] == str(root / "lib" / "libamdhip64.so")


def test_wheels_that_are_not_unpacked(layout, monkeypatch):
    """amd-smi and the disassembler run from rocm-sdk-core. Its hipcc would miss HIP's headers, so it is not taken."""
    folder = layout("wheels_not_unpacked")
    site_packages(folder, monkeypatch)
    core = folder / "_rocm_sdk_core"
    assert rocm.rocm_roots()[-1] == core == rocm.wheel_without_headers()
    assert rocm.find_program("amd-smi") == str(core / "bin" / "amd-smi")
    assert hazards.objdump() == str(core / "lib/llvm/bin/llvm-objdump")
    with pytest.raises(CompilerNotFound, match="_rocm_sdk_core has no headers: install the wheel rocm-sdk-devel"):
        find_compiler("gfx942")
    monkeypatch.setenv("ROCM_PATH", str(layout("folder_7")))
    assert "folder_7" in find_compiler("gfx942").program


def test_the_order_of_the_roots(layout, monkeypatch, tmp_path):
    site_packages(layout("wheels"), monkeypatch)
    for name in rocm.VARIABLES:
        monkeypatch.setenv(name, str(tmp_path / name))
    wheels = [tmp_path / "wheels" / name for name in rocm.WHEELS]
    named = [tmp_path / name for name in rocm.VARIABLES]
    monkeypatch.setattr(rocm, "DEFAULT_FOLDERS", ("/opt/rocm", "/opt/rocm/core"))
    assert rocm.rocm_roots() == [*named, *wheels, Path("/opt/rocm"), Path("/opt/rocm/core")]


@pytest.mark.parametrize(
    ("version", "hip", "rocm_version", "text"),
    [
        ("2.7.1+rocm6.3", "6.3.42134-a9a80e791", None, "ROCm 6.3 (HIP 6.3.42134-a9a80e791)"),
        ("2.8.0.dev+gitabc", "6.4.43484", None, "HIP 6.4.43484"),
        ("2.10.0+rocm7.2.4.lw.git1a2b3c4d", "7.2.53211", None, "ROCm 7.2.4 (HIP 7.2.53211)"),
        ("2.12.0+rocm7.15.0a20260727", "7.15.26301", "7.15.0", "ROCm 7.15.0 (HIP 7.15.26301)"),
        ("2.12.0+rocm10.0.0", "7.15.26333", None, "ROCm 10.0.0 (HIP 7.15.26333)"),
        ("2.13.0+rocm10.1.0a20261012", "7.16.26341", None, "ROCm 10.1.0 (HIP 7.16.26341)"),
        ("2.14.0+git1234", "7.16.26341", "10.0.0", "ROCm 10.0.0 (HIP 7.16.26341)"),
        ("2.14.0+git1234", "7.16.26341", None, "HIP 7.16.26341"),
        ("2.9.1+rocm7.1", "7.1.0", None, "ROCm 7.1 (HIP 7.1.0)"),  # ROCm's version written as HIP's
    ],
)
def test_what_torch_is_built_for(version, hip, rocm_version, text):
    numbers = SimpleNamespace(hip=hip, cuda=None, **({"rocm": rocm_version} if rocm_version else {}))
    assert rocm.torch_is_built_for(SimpleNamespace(__version__=version, version=numbers)) == text
    others = SimpleNamespace(hip=None, cuda="13.0"), SimpleNamespace(hip=None, cuda=None)
    texts = [rocm.torch_is_built_for(SimpleNamespace(__version__="2.13.0", version=other)) for other in others]
    assert texts == ["CUDA 13.0", "CPU"]
