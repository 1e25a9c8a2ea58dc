# SPDX-License-Identifier: Apache-2.0
"""Compiles .hip files for gfx942 with clang 19, as tests need them: device code object, assembly, resource remarks,
host library.

    code_object("rms_norm")                               hip_ops/ops/*/rms_norm.hip
    code_object("rms_norm", defines=["BUG_NO_SYNC"])      with a bug switched on
    code_object(Path(__file__).parent / "kernels/x.hip")  any other file

Products are kept between sessions in $XDG_CACHE_HOME/hip_ops_gfx942 (default ~/.cache), named by a hash of the source,
of all headers that it could include, of the flags and of the compiler's version; they are written next to the target
and renamed, so parallel sessions do not disturb each other. A missing tool skips the test, or fails it under CI=true.
"""

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from tests.hip_ops.kernel_files import kernel_source
from tools.device_libs import with_gfx942

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "hip_ops" / "runtime" / "csrc"  # the headers that all kernels share
COMPILER = "clang++-19"
ARCH = "gfx942"
FLAGS = ("-x", "hip", f"--offload-arch={ARCH}", "-std=c++17", "-O3", "-fno-strict-aliasing", "-Werror=pass-failed")
DEVICE_LIBRARIES = ("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode", "/opt/rocm/amdgcn/bitcode")
# what hipcc (the driver of ROCm 6.0.2 was read) adds to clang's command
HIPCC_FLAGS = ("-mllvm", "-amdgpu-early-inline-all=true", "-mllvm", "-amdgpu-function-calls=false")
KEEP_DAYS = 14


class CompileError(RuntimeError):
    """The compiler's message."""


def require(tool: str) -> str:
    """Path of a program; skips the test where it is missing, fails it under CI=true (as the require_tool fixture
    does).
    """
    found = shutil.which(tool)
    if found is None:
        reason = f"{tool} is not on PATH; tools/apt-packages.txt names the package"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    return found


@functools.cache
def cache_directory() -> Path:
    """Makes the folder on first use and deletes files that were unused for two weeks."""
    directory = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hip_ops_gfx942"
    directory.mkdir(parents=True, exist_ok=True)
    oldest = time.time() - KEEP_DAYS * 86400
    for entry in directory.iterdir():
        try:
            if entry.is_file() and entry.stat().st_mtime < oldest:
                entry.unlink()
        except OSError:
            continue  # another session was faster
    return directory


def _run(command: list[str], **options) -> str:
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command)}\n{done.stderr or done.stdout}")
    return done.stderr


@functools.cache
def compiler_version() -> str:
    return subprocess.run(
        [require(COMPILER), "--version"], check=True, capture_output=True, text=True
    ).stdout.splitlines()[0]


@functools.cache
def device_library_flags() -> tuple[str, ...]:
    """Where clang finds ocml and ockl. Debian's set predates gfx942: its ISA file is then derived from gfx940's, in a
    directory of links.

    A ROCm installation's own set is used where it is the only one; its bitcode must be readable by clang 19.
    """
    override = os.environ.get("HIP_DEVICE_LIB_PATH")
    found = next(
        (
            Path(place)
            for place in ((override,) if override else DEVICE_LIBRARIES)
            if (Path(place) / "ockl.bc").is_file()
        ),
        None,
    )
    if found is None:
        reason = (
            f"no ROCm device libraries in {', '.join(DEVICE_LIBRARIES)} or HIP_DEVICE_LIB_PATH; Debian package "
            "rocm-device-libs"
        )
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    folder = with_gfx942(found, cache_directory(), require)
    return (f"--rocm-device-lib-path={folder}",)


def source_path(source: str | Path) -> Path:
    """A name stands for hip_ops/ops/*/<name>.hip, anything else is a path."""
    path = Path(source) if isinstance(source, Path) or str(source).endswith(".hip") else kernel_source(f"{source}.hip")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such kernel source")
    return path


def _headers(path: Path) -> list[Path]:
    return sorted(
        {
            header
            for directory in (path.parent, SOURCES)
            for pattern in ("*.h", "*.hpp", "*.inc")
            for header in directory.glob(pattern)
        }
    )


def _key(path: Path, flags: Iterable[str]) -> str:
    """Hash of everything that the product depends on."""
    digest = hashlib.sha256(compiler_version().encode())
    for item in flags:
        digest.update(item.encode() + b"\0")
    for part in (path, *_headers(path)):
        digest.update(part.name.encode() + b"\0" + part.read_bytes())
    return digest.hexdigest()[:20]


def _flags(defines: Iterable[str]) -> tuple[str, ...]:
    require("ld.lld-19")
    return (*FLAGS, *device_library_flags(), f"-I{SOURCES}", *(f"-D{define}" for define in defines))


def _kept(product: Path) -> bool:
    """Whether the cache has it. Its time is renewed once a day, not at every use: readers know a file by its time."""
    notes = product.with_suffix(".remarks")
    if not product.is_file():
        return False
    if product.stat().st_mtime < time.time() - 86400:
        for file in (product, notes):
            if file.is_file():
                os.utime(file)
    return True


def _product(source: str | Path, suffix: str, flags: Iterable[str], defines: Iterable[str]) -> Path:
    """Compile unless the cache has it. The compiler's remarks are kept next to the product."""
    # A compilation unit's name enters the code object. The default holds the path; the shipped library has this one.
    path = source_path(source)
    flags = (*_flags(defines), f"-cuid={path.stem}", *flags)
    product = cache_directory() / f"{path.stem}-{_key(path, flags)}{suffix}"
    if _kept(product):
        return product
    with tempfile.TemporaryDirectory(dir=cache_directory()) as temporary:
        output = Path(temporary) / product.name
        remarks = _run([require(COMPILER), *flags, str(path), "-o", str(output)])
        notes = Path(temporary) / "remarks"
        notes.write_text(remarks)
        notes.rename(product.with_suffix(".remarks"))
        output.rename(product)
    return product


def hipcc_object(source: str | Path) -> Path:
    """code_object() with the flags that hipcc adds."""
    return _product(source, ".hipcc.co", (*HIPCC_FLAGS, *_DEVICE_ONLY), ())


def newer_object(source: str | Path) -> Path:
    """code_object() by clang 22, which the package ziglang 0.17.1 holds; the test is skipped where it is not installed.

    zig brings neither clang's own headers nor a linker for AMD: those of clang 19 serve. Its clang needs newer HIP
    headers than Debian's, which Triton holds, and Debian's ocml needs a constant that newer clangs no longer link.
    """
    pytest.importorskip("ziglang")
    path, version = source_path(source), metadata.version("ziglang")
    triton = Path(pytest.importorskip("triton").__file__).parent
    resources = subprocess.run([require(COMPILER), "-print-resource-dir"], check=True, capture_output=True, text=True)
    (library,) = device_library_flags()
    daz = f"{library.partition('=')[2]}/oclc_daz_opt_off.bc"
    flags = (*_flags(()), *_DEVICE_ONLY, "-resource-dir", resources.stdout.strip(), "-mcode-object-version=5")
    flags += ("-Xclang", "-mlink-builtin-bitcode", "-Xclang", daz, "-isystem", f"{triton}/backends/amd/include")
    product = cache_directory() / f"{path.stem}-{_key(path, (*flags, version))}.newer.co"
    if not _kept(product):
        linker = Path(require("ld.lld-19")).resolve().parent
        environment = os.environ | {"PATH": f"{linker}{os.pathsep}{os.environ['PATH']}"}
        with tempfile.TemporaryDirectory(dir=cache_directory()) as temporary:
            output = Path(temporary) / product.name
            _run([sys.executable, "-m", "ziglang", "clang", *flags, str(path), "-o", str(output)], env=environment)
            output.rename(product)
    return product


_DEVICE_ONLY = ("--cuda-device-only", "--no-gpu-bundle-output", "-Rpass-analysis=kernel-resource-usage", "-c")


def code_object(source: str | Path, defines: Iterable[str] = ()) -> Path:
    """The gfx942 ELF of a source, as hipModuleLoad would take it."""
    return _product(source, ".co", _DEVICE_ONLY, tuple(defines))


def code_objects(sources: Iterable[str | Path]) -> list[Path]:
    """Several sources at once, two compilers side by side."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(code_object, sources))


def assembly(source: str | Path, defines: Iterable[str] = ()) -> Path:
    """The compiler's assembly of the device side, with loop comments."""
    return _product(source, ".s", ("--cuda-device-only", "-S"), tuple(defines))


def host_library(source: str | Path, defines: Iterable[str] = ()) -> Path:
    """The host side, compiled and linked against libamdhip64 around the device code of code_object(): shows that it
    links.

    The embedded ELF is not wrapped as a bundle, so this library is for link checks and symbol tables, not for a GPU.
    """
    device = code_object(source, defines)
    flags = (
        "--cuda-host-only",
        "-fPIC",
        "-shared",
        "-fuse-ld=lld-19",
        "-Wl,--no-undefined",
        "-Xclang",
        "-fcuda-include-gpubinary",
        "-Xclang",
        str(device),
        "-lamdhip64",
    )
    return _product(source, ".so", flags, tuple(defines))


def assemble(text: str, name: str = "assembly") -> Path:
    """A code object from gfx942 assembly."""
    flags = ["--target=amdgcn-amd-amdhsa", f"-mcpu={ARCH}", "-x", "assembler"]
    digest = hashlib.sha256("\0".join([compiler_version(), *flags, text]).encode()).hexdigest()
    product = cache_directory() / f"{name}-{digest[:20]}.co"
    if not _kept(product):
        require("ld.lld-19")
        with tempfile.TemporaryDirectory(dir=cache_directory()) as temporary:
            source, output = Path(temporary) / "kernel.s", Path(temporary) / product.name
            source.write_text(text)
            _run([require(COMPILER), *flags, "-fuse-ld=lld-19", str(source), "-o", str(output)])
            output.rename(product)
    return product


def resource_remarks(source: str | Path, defines: Iterable[str] = ()) -> dict[str, dict[str, int]]:
    """Kernel -> what clang's kernel-resource-usage remark says, e.g. {"VGPRs": 40, "Occupancy [waves/SIMD]": 8}."""
    text = code_object(source, defines).with_suffix(".remarks").read_text()
    kernels: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    for key, value in re.findall(r"remark:\s+([\w /\[\]]+): (\S+) \[-Rpass-analysis=kernel-resource-usage\]", text):
        key = key.strip()
        if key == "Function Name":
            current = kernels.setdefault(value, {})
        elif value.isdigit():
            current[key] = int(value)
    return kernels
