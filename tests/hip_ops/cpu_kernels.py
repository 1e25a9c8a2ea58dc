# SPDX-License-Identifier: Apache-2.0
"""Kernel sources as CPU libraries: plain, with a bug switched on, or under AddressSanitizer and UBSan. Needs no torch.

    kernels = cpu_kernels("muon")                                  hip_ops/ops/muon/muon.hip
    kernels = cpu_kernels("muon", defines=["BUG_TAIL"])            the same with a bug
    kernels = cpu_kernels(KERNELS / "barrier.hip")                 any other file
    code = kernels.ho_muon_update(array, None, 3, 1e-5, None)      pointers: numpy arrays, torch tensors, None or
                                                                   addresses

    with schedule("random:3"): ...                                 the order in which threads run
                                                                   (portable_cpu_machine.h)

    path = build_cpu_library("muon", sanitize=True)                needs the sanitizer's runtime in the process from
                                                                   its start
    run_sanitized(PROGRAM, path)                                   runs Python text in such a process; fails with the
                                                                   sanitizer's message

Objects are kept in the kernel cache under the hash of source, headers, flags and compiler.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from hip_ops.runtime.build import CSRC, build, cache_folder
from hip_ops.runtime.compilers import find_compiler
from hip_ops.runtime.launchers import load
from tests.hip_ops.kernel_files import kernel_source

ROOT = Path(__file__).resolve().parents[2]
KERNELS = Path(__file__).resolve().parent / "kernels"
SCHEDULES = ("forward", "reverse", "random:1")

# -O0 compiles in a third of -O1's time, and sanitizers see every access either way. Without recovery a finding ends the
# process.
SANITIZE = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")


def require_gxx() -> None:
    if shutil.which("g++") is None:
        pytest.fail("g++ is not on PATH") if os.environ.get("CI") == "true" else pytest.skip("g++ is not on PATH")


def source_files(sources: Iterable[str | Path]) -> tuple[Path, ...]:
    """A name stands for hip_ops/ops/*/<name>.hip; abi.hip, which every library needs, is added."""
    files = [kernel_source(f"{source}.hip") if isinstance(source, str) else source for source in sources]
    return tuple(dict.fromkeys((*files, kernel_source("abi.hip"))))


@functools.cache
def _headers(folder: Path) -> bytes:
    return b"".join(
        header.name.encode() + header.read_bytes() for header in sorted({*folder.glob("*.h"), *CSRC.glob("*.h")})
    )


def _cached(name: str, identity: list[bytes], make) -> Path:
    """The file that `make(path)` writes, kept under the hash of `identity`."""
    folder = cache_folder() / "tests"
    folder.mkdir(parents=True, exist_ok=True)
    stem, _, suffix = name.rpartition(".")
    product = folder / f"{stem}-{hashlib.sha256(b'|'.join(identity)).hexdigest()[:20]}.{suffix}"
    if not product.is_file():
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch) / product.name
            make(made)
            os.replace(made, product)
    return product


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"


@functools.cache
def build_cpu_library(
    *sources: str | Path, defines: tuple[str, ...] = (), sanitize: bool = False, before: Path | None = None
) -> Path:
    """One library of `sources`. before: a header that is included before each, for kernels that do not run."""
    require_gxx()
    compiler = find_compiler("cpu")
    flags = (
        *compiler.compile_flags,
        f"-I{CSRC}",
        *(f"-D{define}" for define in defines),
        *(SANITIZE if sanitize else ()),
        *(() if before is None else ("-O0", "-include", str(before))),
    )
    of_all = b"" if before is None else before.read_bytes()
    objects = []
    for file in source_files(sources):
        identity = [
            compiler.version.encode(),
            " ".join(flags).encode(),
            _headers(file.parent),
            file.read_bytes(),
            of_all,
        ]
        objects.append(
            _cached(
                f"{file.stem}.o",
                identity,
                lambda made, file=file: _run([compiler.program, *flags, "-c", str(file), "-o", str(made)]),
            )
        )
    link = (*compiler.link_flags, *(SANITIZE if sanitize else ()))
    names = [" ".join(link).encode(), *(str(file).encode() for file in objects)]
    return _cached(
        "libcpu.so", names, lambda made: _run([compiler.program, *map(str, objects), *link, "-o", str(made)])
    )


class CpuKernels:
    """The functions of a library as attributes; numpy arrays and torch tensors become addresses."""

    def __init__(self, path: Path | str, sources: Iterable[str | Path]):
        self.library = load(Path(path), *source_files(sources))

    def __getattr__(self, name: str):
        function = getattr(self.library, name)

        def call(*arguments):
            assert len(arguments) == len(function.argtypes), (
                f"{name} takes {len(function.argtypes)} arguments, {len(arguments)} were given"
            )
            return function(*map(_address, arguments))

        return call


def _address(argument):
    if hasattr(argument, "data_ptr"):
        return argument.data_ptr()
    if hasattr(argument, "ctypes"):
        return argument.ctypes.data
    return argument


def cpu_kernels(*sources: str | Path, defines: Iterable[str] = ()) -> CpuKernels:
    """Functions of the shipped sources come from the package's own build, which other tests use too."""
    shipped = not defines and all(isinstance(each, str) for each in sources)
    return CpuKernels(build("cpu") if shipped else build_cpu_library(*sources, defines=tuple(defines)), sources)


@contextlib.contextmanager
def schedule(name: str) -> Iterator[None]:
    before = os.environ.get("HO_CPU_SCHEDULE")
    os.environ["HO_CPU_SCHEDULE"] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ["HO_CPU_SCHEDULE"]
        else:
            os.environ["HO_CPU_SCHEDULE"] = before


def run_python(
    program: str, *arguments: object, timeout: float = 120, **environment: str
) -> subprocess.CompletedProcess:
    """Runs Python text in a process of its own, in the repository's root; for kernels that abort."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )


def sanitizer_environment() -> dict[str, str]:
    """Python itself is not built with sanitizers, so their runtime must be loaded before it. numpy's arrays come from
    malloc, and an access beyond one is detected; torch is not to be imported there (it takes long, and its allocator
    hides its blocks).
    """
    runtimes = []
    for runtime in ("libasan.so", "libubsan.so"):
        runtimes.append(
            subprocess.run(
                ["g++", f"-print-file-name={runtime}"], capture_output=True, text=True, check=True
            ).stdout.strip()
        )
    return {
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONMALLOC": "malloc",
    }


def run_sanitized(
    program: str, *arguments: object, expect_failure: bool = False, timeout: float = 120, **environment: str
) -> str:
    """What the program prints. `expect_failure`: it must end by a sanitizer's finding instead."""
    done = run_python(program, *arguments, timeout=timeout, **{**sanitizer_environment(), **environment})
    assert (done.returncode != 0) == expect_failure, done.stdout[-6000:]
    return done.stdout
