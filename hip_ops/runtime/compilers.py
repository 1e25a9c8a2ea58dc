# SPDX-License-Identifier: Apache-2.0
"""Finds the compiler of a target and its flags.

A target names the machine that a library is built for: an AMD architecture (`gfx942`), an NVIDIA one (`sm_90`) or
`cpu`. AMD targets need hipcc, or a clang that knows the architecture and the ROCm device libraries; NVIDIA targets need
nvcc; the CPU needs g++.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from hip_ops.errors import mistake
from hip_ops.runtime import rocm

HEADERS = Path(__file__).resolve().parent / "csrc"  # headers of several operators' kernels

# Waves of 64 and bf16 MFMA: MI200, MI300, MI350. gfx942 and gfx950 are verified.
AMD_ARCHITECTURES = ("gfx90a", "gfx942", "gfx950")
OLDEST_CLANG = 17  # the first release that knows gfx942
NVCC_FOLDERS = ("/usr/local/cuda/bin",)  # of the installer; searched after the environment variables
DEBIAN_DEVICE_LIBRARIES = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")

_OPTIMIZE = ("-O3", "-std=c++17")
_HOST = ("-fPIC", "-fno-strict-aliasing", "-fvisibility=hidden")


class CompilerNotFound(RuntimeError):
    """There is no compiler for a target; the message names the programs and folders that were searched."""


@dataclass(frozen=True)
class Compiler:
    """A compiler with its flags for compiling one .hip file and for linking the objects to a shared library."""

    program: str
    version: str
    compile_flags: tuple[str, ...]
    link_flags: tuple[str, ...]

    def compile_command(self, source: Path, output: Path) -> list[str]:
        return [self.program, *self.compile_flags, f"-I{HEADERS}", "-c", str(source), "-o", str(output)]

    def link_command(self, objects: list[Path], output: Path) -> list[str]:
        return [self.program, *map(str, objects), *self.link_flags, "-o", str(output)]


def check_target(target: str) -> str:
    """Return `target`; raises ValueError where it is not a target's name."""
    if target == "cpu" or target in AMD_ARCHITECTURES or re.fullmatch(r"sm_\d{2,3}a?", target):
        return target
    allowed = ", ".join((*AMD_ARCHITECTURES, "sm_<capability> such as sm_90", "cpu"))
    raise mistake(f"target={target}", "no such target", allowed)


def default_amd_target() -> str:
    """Return the AMD architecture to build for on a machine without a GPU: HIP_OPS_ARCH, otherwise the first of
    PYTORCH_ROCM_ARCH that the kernels support, otherwise gfx942."""
    requested = os.environ.get("HIP_OPS_ARCH")
    if requested:
        if requested not in AMD_ARCHITECTURES:
            raise mistake(f"HIP_OPS_ARCH={requested}", "no such architecture", ", ".join(AMD_ARCHITECTURES))
        return requested
    listed = re.split(r"[;,\s]+", os.environ.get("PYTORCH_ROCM_ARCH", ""))
    return next((name for name in (entry.split(":")[0] for entry in listed) if name in AMD_ARCHITECTURES), "gfx942")


def find_compiler(target: str) -> Compiler:
    """Return the compiler of `target`. Raises CompilerNotFound."""
    check_target(target)
    if target == "cpu":
        return _cpu()
    return _nvidia(target) if target.startswith("sm_") else _amd(target)


def program_version(program: str) -> str:
    """Return the output of `program --version`, or "" where it does not run. It is part of a library's hash."""
    try:
        changed = os.stat(program).st_mtime_ns
    except OSError:
        return ""
    return _version(program, changed)


@lru_cache
def _version(program: str, _changed: int) -> str:
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def programs(names: list[str], places: Iterable[Path | None]) -> Iterator[str]:
    """Yield the programs of `names` that run, in the order of `places`: a folder, or None for PATH."""
    for place in places:
        for name in names:
            program = shutil.which(name, path=place and str(place))
            if program and program_version(program):
                yield program


def _amd(target: str) -> Compiler:
    flags = ("-x", "hip", f"--offload-arch={target}", *_OPTIMIZE, *_HOST)
    wheel = rocm.wheel_without_headers()
    compilers = [folder for folder in rocm.folders("bin") if wheel not in folder.parents]
    if wheel and not any((folder / "hipcc").is_file() for folder in compilers):
        raise CompilerNotFound(
            f"ROCm's Python wheel in {wheel} has no headers: install the wheel rocm-sdk-devel of the same version and "
            "unpack it with `rocm-sdk init`"
        )
    for program in programs(["hipcc"], (*compilers, None)):
        return Compiler(program, program_version(program), flags, ("-shared", "-fPIC"))
    clangs = ["clang++", "amdclang++", *(f"clang++-{major}" for major in range(OLDEST_CLANG, OLDEST_CLANG + 10))]
    too_old = []
    for program in programs(clangs, (*rocm.folders(*rocm.LLVM_FOLDERS), None)):
        version = program_version(program)
        major = re.search(r"clang version (\d+)", version)
        if major is None or int(major[1]) < OLDEST_CLANG:
            too_old.append(program)
            continue
        folders = (*rocm.folders(*rocm.DEVICE_LIBRARY_FOLDERS), DEBIAN_DEVICE_LIBRARIES)
        isa = f"oclc_isa_version_{target.removeprefix('gfx')}.bc"
        libraries = next((folder for folder in folders if (folder / isa).is_file()), None)
        if libraries is None:
            raise CompilerNotFound(
                f"{program} is installed, but not the ROCm device libraries for {target} (folder amdgcn/bitcode under "
                f"{rocm.SEARCHED} or /usr/lib): install rocm-device-libs, or a ROCm and set ROCM_PATH"
            )
        runtime = next((str(file) for file in rocm.folders("lib/libamdhip64.so") if file.is_file()), "-lamdhip64")
        return Compiler(
            program, version, (*flags, f"--rocm-device-lib-path={libraries}"), ("-shared", "-fPIC", runtime)
        )
    old = f" ({', '.join(too_old)} is older than clang {OLDEST_CLANG})" if too_old else ""
    raise CompilerNotFound(
        f"neither hipcc nor a clang++ that knows {target} is on PATH or under {rocm.SEARCHED}{old}: install ROCm's "
        "hipcc and set ROCM_PATH"
    )


def _nvidia(target: str) -> Compiler:
    folders = [Path(folder) / "bin" for folder in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if folder]
    for program in programs(["nvcc"], (*folders, *map(Path, NVCC_FOLDERS), None)):
        flags = ("-x", "cu", f"-arch={target}", *_OPTIMIZE, "-Xcompiler", ",".join(_HOST))
        return Compiler(program, program_version(program), flags, (f"-arch={target}", "-shared"))
    raise CompilerNotFound(
        "nvcc is not on PATH, nor under CUDA_HOME, CUDA_PATH or /usr/local/cuda: install the CUDA toolkit and set "
        "CUDA_HOME"
    )


def _cpu() -> Compiler:
    # The fibers need a compiler with GNU extensions, and -fno-gnu-unique keeps two libraries in one process from
    # sharing their LDS.
    for program in programs(["g++"], [None]):
        flags = ("-x", "c++", "-O1", "-std=c++17", *_HOST, "-fno-gnu-unique", "-Wno-unknown-pragmas", "-Wno-psabi")
        return Compiler(program, program_version(program), flags, ("-shared",))
    raise CompilerNotFound("g++ is not on PATH: install it")
