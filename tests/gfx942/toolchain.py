# SPDX-License-Identifier: Apache-2.0
"""Compiles .hip files for gfx942 with clang 19, as tests need them: device code object, assembly, resource remarks,
host library. For gfx950, which clang 19 does not know, with clang 22 of the package ziglang.

    code_object("rms_norm")                               hip_ops/ops/*/rms_norm.hip
    code_object("rms_norm", defines=["BUG_NO_SYNC"])      with a bug switched on
    code_object(Path(__file__).parent / "kernels/x.hip")  any other file

Products are kept between sessions in $XDG_CACHE_HOME/hip_ops_gfx942 (default ~/.cache), named by a hash of the source,
of all headers that it could include, of the flags and of the compiler's version; they are written next to the target and
renamed, so parallel sessions do not disturb each other. A missing tool skips the test, or fails it under CI=true.

The code objects of hip_ops are those of the shipped library as long as it has their sources, so that the tests run what
ships and need no compiler for it. HIP_OPS_TEST_TARGET=gfx950 makes all tests of the emulator run gfx950's code.
"""

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

import pytest

from hip_ops.runtime import hazards
from hip_ops.runtime.build import LIBRARY, MANIFEST, PACKAGE, kernel_sources, shipped_folder, sources_digest
from tests.hip_ops.kernel_files import kernel_source
from tests.tool import require_tool, skip_or_fail
from tools.device_libs import with_architecture

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "hip_ops" / "runtime" / "csrc"  # the headers that all kernels share
COMPILER = "clang++-19"
TARGETS = ("gfx942", "gfx950")
ARCH = os.environ.get("HIP_OPS_TEST_TARGET", "gfx942")  # of the code that tests run
assert ARCH in TARGETS, f"HIP_OPS_TEST_TARGET={ARCH}: allowed are {', '.join(TARGETS)}"
NEWER_PACKAGE, NEWER_VERSION, NEWER_CLANG = "ziglang", "0.17.1", "clang version 22.1.8"
NEWER_COMPILER = (sys.executable, "-m", NEWER_PACKAGE, "clang")
NEWER_FLAGS = ("-mcode-object-version=5", "--target=x86_64-unknown-linux-gnu")
DEVICE_LIBRARIES = ("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode", "/opt/rocm/amdgcn/bitcode")
# what hipcc (the driver of ROCm 6.0.2 was read) adds to clang's command
HIPCC_FLAGS = ("-mllvm", "-amdgpu-early-inline-all=true", "-mllvm", "-amdgpu-function-calls=false")
KEEP_DAYS = 14
# The sources that `make test` compiles: their number of waves is bounded by registers, by LDS and by neither.
COMPILED = ("cca_prologue_backward", "expert_sort", "muon")
WITHOUT_KERNELS = "abi"  # of hip_ops' sources the one with host code alone, of which the library has no code object


class CompileError(RuntimeError):
    """The compiler's message."""


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


def run(command: Iterable[str], **options) -> str:
    """The standard error of a compiler; it finds clang 19's linker and offload bundler."""
    tools = Path(require_tool("ld.lld-19")).resolve().parent
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run([*command], capture_output=True, text=True, env=environment, **options)
    if done.returncode != 0:
        raise CompileError(f"{' '.join(command)}\n{done.stderr or done.stdout}")
    return done.stderr


def is_newer(target: str) -> bool:
    """Whether a target needs the newer compiler."""
    return target == "gfx950"


def compiler(newer: bool) -> tuple[str, ...]:
    """The compiler's command. Skips the test where the package with the newer one is not installed."""
    if newer:
        pytest.importorskip(NEWER_PACKAGE, reason=f"pip install {NEWER_PACKAGE}=={NEWER_VERSION}")
        assert metadata.version(NEWER_PACKAGE) == NEWER_VERSION, f"pip install {NEWER_PACKAGE}=={NEWER_VERSION}"
    return NEWER_COMPILER if newer else (COMPILER,)


def flags_of(target: str, newer: bool) -> tuple[str, ...]:
    """Flags that a target's code depends on."""
    common = ("-x", "hip", f"--offload-arch={target}", "-std=c++17", "-O3", "-fno-strict-aliasing")
    return (*common, "-Werror=pass-failed", *(NEWER_FLAGS if newer else ()))


def path_flags(target: str, newer: bool) -> tuple[str, ...]:
    """Flags that name folders of this machine. zig brings neither clang's own headers nor a linker for AMD: those of
    clang 19 serve. Its clang needs newer HIP headers than Debian's, which Triton holds.
    """
    flags = device_library_flags(target)
    if not newer:
        return flags
    triton = Path(pytest.importorskip("triton").__file__).parent
    resources = subprocess.run(
        [require_tool(COMPILER), "-print-resource-dir"], check=True, capture_output=True, text=True
    )
    return (*flags, "-resource-dir", resources.stdout.strip(), "-isystem", f"{triton}/backends/amd/include")


@functools.cache
def compiler_version(newer: bool = False) -> str:
    if newer:
        return f"{NEWER_CLANG}, {NEWER_PACKAGE} {NEWER_VERSION}"
    return subprocess.run(
        [require_tool(COMPILER), "--version"], check=True, capture_output=True, text=True
    ).stdout.splitlines()[0]


@functools.cache
def device_library_flags(target: str = ARCH) -> tuple[str, ...]:
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
        skip_or_fail(
            f"no ROCm device libraries in {', '.join(DEVICE_LIBRARIES)} or HIP_DEVICE_LIB_PATH; Debian package "
            "rocm-device-libs"
        )
    folder = with_architecture(found, cache_directory(), require_tool, target)
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


def _key(path: Path, flags: Iterable[str], newer: bool) -> str:
    """Hash of everything that the product depends on."""
    digest = hashlib.sha256(compiler_version(newer).encode())
    for item in flags:
        digest.update(item.encode() + b"\0")
    for part in (path, *_headers(path)):
        digest.update(part.name.encode() + b"\0" + part.read_bytes())
    return digest.hexdigest()[:20]


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


def _product(
    source: str | Path,
    suffix: str,
    flags: Iterable[str],
    defines: Iterable[str],
    target: str = ARCH,
    newer: bool | None = None,
) -> Path:
    """Compile unless the cache has it. The compiler's remarks are kept next to the product."""
    # A compilation unit's name enters the code object. The default holds the path; the shipped library has this one.
    path, newer = source_path(source), is_newer(target) if newer is None else newer
    command = compiler(newer)
    flags = (*flags_of(target, newer), *path_flags(target, newer), f"-I{SOURCES}", f"-cuid={path.stem}", *flags)
    flags += tuple(f"-D{define}" for define in defines)
    product = cache_directory() / f"{path.stem}-{_key(path, flags, newer)}{suffix}"
    if _kept(product):
        return product
    with tempfile.TemporaryDirectory(dir=cache_directory()) as temporary:
        output = Path(temporary) / product.name
        remarks = run([*command, *flags, str(path), "-o", str(output)])
        notes = Path(temporary) / "remarks"
        notes.write_text(remarks)
        notes.rename(product.with_suffix(".remarks"))
        output.rename(product)
    return product


def hipcc_object(source: str | Path) -> Path:
    """code_object() with the flags that hipcc adds."""
    return _product(source, ".hipcc.co", (*HIPCC_FLAGS, *_DEVICE_ONLY), ())


def newer_object(source: str | Path) -> Path:
    """code_object() of gfx942 by clang 22; the test is skipped where its package is not installed."""
    return _product(source, ".newer.co", _DEVICE_ONLY, (), "gfx942", newer=True)


def shipped_object(source: str | Path, target: str) -> Path:
    """The code object of one of hip_ops' sources in the shipped library. Fails where the library has other sources."""
    folder = shipped_folder(target)
    manifest = json.loads((folder / MANIFEST).read_text())
    assert manifest["sources"] == sources_digest(), f"run `python -m tools.ship`: {target}'s library has other sources"
    product = cache_directory() / f"{source_path(source).stem}-{manifest['sha256'][:20]}.shipped.co"
    if not _kept(product):
        names = [path.stem for path in kernel_sources() if path.stem != WITHOUT_KERNELS]
        content = dict(zip(names, hazards.code_objects((folder / LIBRARY).read_bytes()), strict=True))
        with tempfile.TemporaryDirectory(dir=cache_directory()) as temporary:
            output = Path(temporary) / product.name
            output.write_bytes(content[source_path(source).stem])
            output.rename(product)
    return product


_DEVICE_ONLY = ("--cuda-device-only", "--no-gpu-bundle-output", "-Rpass-analysis=kernel-resource-usage", "-c")


def code_object(source: str | Path, defines: Iterable[str] = ()) -> Path:
    """The ELF of a source for ARCH, as hipModuleLoad would take it: the shipped library's while that has the sources and
    the source has a kernel.
    """
    path = source_path(source)
    if not defines and PACKAGE in path.parents and path.stem != WITHOUT_KERNELS and _is_shipped(ARCH):
        return shipped_object(source, ARCH)
    return compiled_object(source, defines)


def compiled_object(source: str | Path, defines: Iterable[str] = ()) -> Path:
    """code_object() of a new compilation, with the compiler's remarks."""
    return _product(source, ".co", _DEVICE_ONLY, tuple(defines))


@functools.cache
def _is_shipped(target: str) -> bool:
    manifest = shipped_folder(target) / MANIFEST
    return manifest.is_file() and json.loads(manifest.read_text())["sources"] == sources_digest()


def compiled_objects(sources: Iterable[str | Path]) -> list[Path]:
    """Several sources at once, two compilers side by side."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(compiled_object, sources))


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


def assemble(text: str, name: str = "assembly", target: str = ARCH) -> Path:
    """A code object from assembly, by the LLVM of the pinned Triton: within this process, since there are hundreds."""
    pytest.importorskip("triton")
    from triton._C.libtriton import amd, llvm

    text = text.replace('amdhsa--gfx942"', f'amdhsa--{target}"')
    digest = hashlib.sha256("\0".join([metadata.version("triton"), target, text]).encode()).hexdigest()
    product = cache_directory() / f"{name}-{digest[:20]}.co"
    if not _kept(product):
        with tempfile.TemporaryDirectory(dir=cache_directory()) as temporary:
            source, output = Path(temporary) / "kernel.o", Path(temporary) / product.name
            llvm.init_targets()
            source.write_bytes(amd.assemble_amdgcn(text, target, ""))
            amd.link_hsaco(str(source), str(output))
            output.rename(product)
    return product


def resource_remarks(source: str | Path, defines: Iterable[str] = ()) -> dict[str, dict[str, int]]:
    """Kernel -> what clang's kernel-resource-usage remark says, e.g. {"VGPRs": 40, "Occupancy [waves/SIMD]": 8}."""
    text = compiled_object(source, defines).with_suffix(".remarks").read_text()
    kernels: dict[str, dict[str, int]] = {}
    current: dict[str, int] = {}
    for key, value in re.findall(r"remark:\s+([\w /\[\]]+): (\S+) \[-Rpass-analysis=kernel-resource-usage\]", text):
        key = key.strip()
        if key == "Function Name":
            current = kernels.setdefault(value, {})
        elif value.isdigit():
            current[key] = int(value)
    return kernels
