# SPDX-License-Identifier: Apache-2.0
"""Test the building of kernels: the cache, its lock, damaged files, and the messages when a compiler fails."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hip_ops.runtime import build as build_module
from hip_ops.runtime import compilers
from hip_ops.runtime.build import BuildError, build, kernel_sources, locked, prebuilt
from hip_ops.runtime.compilers import CompilerNotFound, find_compiler
from hip_ops.runtime.launchers import declarations, load
from tests.hip_ops.cpu_kernels import ROOT, run_python
from tests.hip_ops.kernel_files import kernel_source

# Not the real header: it takes a second to compile, and what is built does not matter for this test.
HEADER = """#pragma once
#define HO_EXPORT extern "C" __attribute__((visibility("default")))
"""
SOURCE = """#include "portable.h"
HO_EXPORT int ho_test_one_run(void* x, void* stream) { *static_cast<float*>(x) = float(NUMBER); return 0; }
"""


@pytest.fixture
def sources(tmp_path, require_tool):
    """Makes a small csrc: a header, abi.hip and one launcher."""
    require_tool("g++")
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "portable.h").write_text(HEADER)
    shutil.copy(kernel_source("abi.hip"), folder)
    (folder / "one.hip").write_text(SOURCE.replace("NUMBER", "1"))
    return folder


def value_of(library: Path, sources: Path) -> float:
    import numpy as np

    x = np.zeros(1, np.float32)
    assert load(library, *sources.glob("*.hip")).ho_test_one_run(x.ctypes.data, None) == 0
    return float(x[0])


def test_builds_once_and_again_when_a_source_changes(sources, empty_cache, capfd):
    first = build("cpu", sources=sources)
    said = capfd.readouterr().err
    assert "hip_ops: building kernels for cpu (once, about 3 s)" in said and str(first) in said
    assert first.parent.parent == empty_cache and value_of(first, sources) == 1
    made = first.stat().st_mtime_ns
    assert build("cpu", sources=sources) == first and first.stat().st_mtime_ns == made
    assert capfd.readouterr().err == "", "from the cache, nothing to say"
    assert {file.name for file in first.parent.iterdir()} == {"libhip_ops.so", "manifest.json", "lock"}, (
        "no scratch is left"
    )

    (sources / "one.hip").write_text(SOURCE.replace("NUMBER", "2"))
    second = build("cpu", sources=sources)
    assert second.parent != first.parent and value_of(second, sources) == 2
    assert build("cpu", sources=sources, force=True) == second and second.stat().st_mtime_ns != made
    (sources / "portable.h").write_text(HEADER + "\n")
    assert prebuilt("cpu", sources=sources) is None, "a header is a source, too"


def test_damaged_and_foreign_files(sources, empty_cache):
    library = build("cpu", sources=sources)
    foreign = library.parent / "notes.txt"
    foreign.write_text("mine")
    (empty_cache / "cpu-foreign").mkdir()
    (empty_cache / "cpu-foreign" / "manifest.json").write_text("[1, 2]")
    left_over = library.parent / "building-killed"
    left_over.mkdir()
    for damage in (
        lambda: library.write_bytes(library.read_bytes()[:1000]),
        lambda: (library.parent / "manifest.json").write_text("{"),
        lambda: library.unlink(),
    ):
        damage()
        assert prebuilt("cpu", sources=sources) is None
        assert build("cpu", sources=sources) == library and prebuilt("cpu", sources=sources) == library
    assert value_of(library, sources) == 1
    assert foreign.read_text() == "mine" and not left_over.exists()


def test_a_killed_build_leaves_no_library(sources, empty_cache, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(build_module.os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        build("cpu", sources=sources)
    assert prebuilt("cpu", sources=sources) is None
    monkeypatch.undo()


BUILD = """
import sys
from pathlib import Path
from hip_ops.runtime.build import build
print(build("cpu", sources=Path(sys.argv[1])))
"""


def test_two_processes_build_once(sources, empty_cache):
    environment = {**os.environ, "HIP_OPS_CACHE": str(empty_cache), "PYTHONPATH": str(ROOT)}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", BUILD, str(sources)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    ended = [(*process.communicate(timeout=300), process.returncode) for process in running]
    assert [code for _, _, code in ended] == [0] * 3
    assert len({out for out, _, _ in ended}) == 1
    assert sum("building kernels" in err for _, err, _ in ended) == 1


def test_waits_for_the_lock(tmp_path, capfd):
    program = (
        "import sys, time; from pathlib import Path; from hip_ops.runtime.build import locked\nwith "
        "locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(1)"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "lock")],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout.readline() == "held\n"
    started = time.monotonic()
    with locked(tmp_path / "lock") as alone:
        assert alone and time.monotonic() - started > 0.3
    assert "waiting for another process that builds" in capfd.readouterr().err
    holder.wait()
    holder.stdout.close()


def test_a_compile_error_shows_command_and_message(sources, empty_cache):
    (sources / "one.hip").write_text('#include "portable.h"\nint broken = missing_name;\n')
    with pytest.raises(BuildError) as caught:
        build("cpu", sources=sources)
    said = str(caught.value)
    assert "this command failed with code 1" in said and "missing_name" in said and "one.hip:2" in said
    assert f"{find_compiler('cpu').program} -x c++" in said
    assert prebuilt("cpu", sources=sources) is None


def test_without_a_compiler_a_library_from_elsewhere_will_do(sources, empty_cache, no_compilers, monkeypatch):
    with pytest.raises(CompilerNotFound, match="g\\+\\+ is not on PATH"):
        build("cpu", sources=sources)
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("PATH", "/usr/bin:/bin:/usr/local/bin")
        library = build("cpu", sources=sources)
    assert build("cpu", sources=sources) == library
    with pytest.raises(CompilerNotFound):
        build("cpu", sources=sources, force=True)
    (sources / "one.hip").write_text(SOURCE.replace("NUMBER", "3"))
    with pytest.raises(CompilerNotFound):
        build("cpu", sources=sources)


def test_the_message_without_a_compiler(no_compilers):
    with pytest.raises(CompilerNotFound, match="neither hipcc nor a clang\\+\\+ that knows gfx942 .* set ROCM_PATH"):
        find_compiler("gfx942")
    with pytest.raises(CompilerNotFound, match="nvcc is not on PATH, nor under CUDA_HOME"):
        find_compiler("sm_90")


def program(folder: Path, name: str, says: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    file.write_text(f"#!/bin/sh\necho '{says}'\n")
    file.chmod(0o755)
    return file


def test_hipcc_of_rocm_path_goes_first(no_compilers, tmp_path, monkeypatch):
    monkeypatch.setenv("ROCM_PATH", str(tmp_path / "rocm"))
    hipcc = program(tmp_path / "rocm" / "bin", "hipcc", "HIP version: 7.1")
    program(tmp_path / "empty", "hipcc", "HIP version: 5.2")
    found = find_compiler("gfx942")
    assert found.program == str(hipcc) and found.version == "HIP version: 7.1"
    assert "--offload-arch=gfx942" in found.compile_flags and "-fno-strict-aliasing" in found.compile_flags


def test_an_old_clang_is_named(no_compilers, tmp_path):
    program(tmp_path / "empty", "clang++", "Debian clang version 16.0.6")
    with pytest.raises(CompilerNotFound, match="clang\\+\\+ is older than clang 17"):
        find_compiler("gfx942")


def test_the_amd_target(monkeypatch):
    for name, value, target in (
        ("PYTORCH_ROCM_ARCH", "gfx1100;gfx90a", "gfx90a"),
        ("PYTORCH_ROCM_ARCH", "gfx942:xnack- gfx90a", "gfx942"),
        ("HIP_OPS_ARCH", "gfx950", "gfx950"),
    ):
        monkeypatch.setenv(name, value)
        assert compilers.default_amd_target() == target
    monkeypatch.setenv("HIP_OPS_ARCH", "gfx1100")
    with pytest.raises(ValueError, match="HIP_OPS_ARCH=gfx1100: no such architecture. Allowed: gfx90a, gfx942, gfx950"):
        compilers.default_amd_target()
    for name in ("HIP_OPS_ARCH", "PYTORCH_ROCM_ARCH"):
        monkeypatch.delenv(name)
    assert compilers.default_amd_target() == "gfx942"
    with pytest.raises(ValueError, match="target=gfx1100: no such target"):
        find_compiler("gfx1100")


def test_a_cache_that_cannot_be_written_is_named(sources, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HIP_OPS_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match="cannot write the kernel cache .*set HIP_OPS_CACHE"):
        build("cpu", sources=sources)


def test_another_abi_is_refused(sources, empty_cache):
    abi = sources / "abi.hip"
    abi.write_text(abi.read_text().replace("return 1;", "return 999;"))
    with pytest.raises(
        RuntimeError, match="has ABI version 999, this hip_ops requires 1. Fix: `python -m hip_ops build --force`"
    ):
        load(build("cpu", sources=sources), *sources.glob("*.hip"))


def test_the_manifest_tells_how_it_was_built(sources, empty_cache):
    told = json.loads((build("cpu", sources=sources).parent / "manifest.json").read_text())
    assert told["target"] == "cpu" and "g++" in told["compiler"] and "-fno-strict-aliasing" in told["command"]


def test_every_launcher_follows_the_convention():
    """Parameters are pointers, int64_t, float or double, and the stream last; `declarations` fails for another type."""
    for name, (_, types) in declarations().items():
        assert name.startswith("ho_")
        if types and not name.endswith("_blocks"):  # those only compute a number of blocks on the host
            assert types[-1].__name__ == "c_void_p", name


@pytest.mark.slow
def test_every_source_compiles_with_nvcc(tmp_path):
    """CUDA's toolkit is no Debian package, so the test is skipped without it, also in CI: the nvcc build is for
    verification on a GPU.
    """
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not on PATH")
    compiler = find_compiler("sm_90")
    for source in kernel_sources():
        done = subprocess.run(compiler.compile_command(source, tmp_path / "x.o"), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr


def test_these_modules_do_not_import_torch():
    done = run_python(
        "import sys, hip_ops.saved_bytes, hip_ops.versions, hip_ops.runtime.build; assert 'torch' not in sys.modules; "
        "print(hip_ops.runtime.build.build)"
    )
    assert done.returncode == 0, done.stdout
