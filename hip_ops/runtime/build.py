# SPDX-License-Identifier: Apache-2.0
"""Finds the shared library of a target: the one that the package ships, otherwise one that is built on this machine, at
first use or ahead of it (`python -m hip_ops build`).

The package ships gfx942's and gfx950's libraries, which the emulator has run (tools/ship.py makes them). They are used
as long as the installed sources are those that they were built from and HIP_OPS_LIBRARY=source does not request a build.

A built library is known by the hash of its sources, flags and compiler: `<cache>/<target>-<hash>/libhip_ops.so`, next
to a manifest.json that holds its checksum. Both are renamed into place, and a library whose checksum differs from its
manifest's is built again. So a killed build or a full disk never leaves a file that would be loaded as a library.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from hip_ops.errors import mistake
from hip_ops.runtime.compilers import AMD_ARCHITECTURES, Compiler, CompilerNotFound, find_compiler

CSRC = Path(__file__).resolve().parent / "csrc"  # headers that all kernels share, and the library's own functions
PACKAGE = CSRC.parents[1]  # hip_ops: each operator's sources lie in its folder
SHIPPED = PACKAGE / "shipped"  # a folder for each target
LIBRARY = "libhip_ops.so"
MANIFEST = "manifest.json"
LIBRARY_VARIABLE = "HIP_OPS_LIBRARY"  # environment variable: shipped (default) or source
SCRATCH_PREFIX = "building-"  # prefix of the folders that a build works in

# an estimate, for the message at the start of a build
_SECONDS_A_FILE = {"gfx": 5, "sm_": 10, "cpu": 3}


class BuildError(RuntimeError):
    """A compiler failed; the message holds its command and its output."""


def build(target: str, *, force: bool = False, sources: Path = PACKAGE) -> Path:
    """Return the path of the shared library of all .hip files below `sources` for `target`: the shipped one, or one
    that is built if it is missing, or again with `force`.

    Without a compiler, a library from the same sources by any compiler is taken (a cache that was filled on another
    machine). Raises CompilerNotFound, BuildError with the compiler's message, and OSError where the cache cannot be
    written.
    """
    library, why_not = shipped(target, sources=sources)
    if library and not force:
        return library
    if library:
        why_not = f"--force; runs use the shipped library unless {LIBRARY_VARIABLE}=source"
    if why_not and os.environ.get("LOCAL_RANK", "0") == "0":  # one line a machine
        print(f"hip_ops: the {target} kernels are built from source: {why_not}", file=sys.stderr, flush=True)
    try:
        compiler = find_compiler(target)
    except CompilerNotFound:
        cached = None if force else prebuilt(target, sources=sources)
        if cached is None:
            raise
        return cached
    folder = _folder(target, compiler, sources)
    if not force and _is_whole(folder):
        return folder / LIBRARY
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / "lock") as alone:
            if force or not _is_whole(folder):  # another process may have built it since
                if alone:
                    for left_over in folder.glob(SCRATCH_PREFIX + "*"):
                        shutil.rmtree(left_over, ignore_errors=True)
                _build(target, compiler, folder, sources)
    except OSError as error:
        raise OSError(
            f"hip_ops: cannot write the kernel cache {folder}: {error}; set HIP_OPS_CACHE to a folder that can be "
            "written"
        ) from error
    return folder / LIBRARY


def cache_folder() -> Path:
    """Return HIP_OPS_CACHE, otherwise hip_ops in XDG_CACHE_HOME, otherwise ~/.cache/hip_ops."""
    requested = os.environ.get("HIP_OPS_CACHE")
    if requested:
        return Path(requested).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "hip_ops"


@contextlib.contextmanager
def locked(file: Path) -> Iterator[bool]:
    """Hold an exclusive lock on `file` between processes; the lock ends with its process.

    Yields False where the file system has no locks (some network mounts). Then two processes may build at once, and the
    atomic renames keep both results intact.
    """
    with open(file, "a") as handle:
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"hip_ops: waiting for another process that builds ({file})", file=sys.stderr, flush=True)
                fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL):
                raise
            yield False
            return
        yield True  # closing the file unlocks it


def shipped_folder(target: str) -> Path:
    return SHIPPED / target


def requested_library() -> str:
    """Return the value of HIP_OPS_LIBRARY, shipped or source. Raises ValueError for another one."""
    requested = os.environ.get(LIBRARY_VARIABLE) or "shipped"
    if requested not in ("shipped", "source"):
        raise mistake(
            f"{LIBRARY_VARIABLE}={requested}", "no such library", "shipped, source", f"unset {LIBRARY_VARIABLE}"
        )
    return requested


def shipped(target: str, *, sources: Path = PACKAGE) -> tuple[Path | None, str]:
    """Return the shipped library of `target` and "", or None and why an AMD target is built from source instead."""
    if target not in AMD_ARCHITECTURES:
        return None, ""
    requested = requested_library()
    folder = shipped_folder(target)
    if not (folder / MANIFEST).is_file():
        return None, f"no library is shipped for {target}, and its kernels are unverified"
    if requested == "source":
        return None, f"{LIBRARY_VARIABLE}=source, so the verified library is not used"
    why_not = _unusable(folder, sources)
    return (None, why_not) if why_not else (folder / LIBRARY, "")


@lru_cache
def _unusable(folder: Path, sources: Path) -> str:
    """Say why the library in `folder` must not run in place of `sources`, or "". Reads all of their files, so once a
    process: every operator needs it."""
    if not _is_whole(folder):
        return f"the shipped library {folder / LIBRARY} is damaged; install the package again"
    if manifest_of(folder / LIBRARY).get("sources") != sources_digest(sources):
        return "the sources are not those of the shipped library, so the kernels are unverified"
    return ""


def library_note(target: str) -> str:
    """Say which library runs on AMD's `target`: the shipped one with its sha256, or why one is built from source."""
    library, why_not = shipped(target)
    return (
        f"shipped with the package, sha256 {manifest_of(library)['sha256']}"
        if library
        else f"built from source: {why_not}"
    )


def manifest_of(library: Path) -> dict:
    """Return the manifest next to `library`."""
    return json.loads((library.parent / MANIFEST).read_text())


def prebuilt(target: str, *, sources: Path = PACKAGE) -> Path | None:
    """Return the newest intact library of these sources for `target` in the cache, built by any compiler, or None."""
    digest = sources_digest(sources)
    whole = []
    for manifest in cache_folder().glob(f"{target}-*/{MANIFEST}"):
        if _is_whole(manifest.parent) and manifest_of(manifest).get("sources") == digest:
            whole.append((manifest.stat().st_mtime, manifest.parent / LIBRARY))
    return max(whole)[1] if whole else None


def kernel_sources(sources: Path = PACKAGE) -> list[Path]:
    """Return all .hip files below `sources`, sorted by name."""
    return sorted(sources.rglob("*.hip"), key=lambda file: file.name)


def sources_digest(sources: Path = PACKAGE) -> str:
    return files_digest((*sources.rglob("*.hip"), *sources.rglob("*.h")))


def files_digest(files: Iterable[Path]) -> str:
    """Return the sha256 over names and contents, in the order of the names."""
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda file: file.name):
        content = file.read_bytes()
        digest.update(f"{file.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def _folder(target: str, compiler: Compiler, sources: Path) -> Path:
    identity = [sources_digest(sources), compiler.version, *compiler.compile_flags, *compiler.link_flags]
    return cache_folder() / f"{target}-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}"


def _is_whole(folder: Path) -> bool:
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        return manifest["sha256"] == hashlib.sha256((folder / LIBRARY).read_bytes()).hexdigest()
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _build(target: str, compiler: Compiler, folder: Path, sources: Path) -> None:
    files = kernel_sources(sources)
    assert files, f"no .hip file in {sources}"
    workers = min(len(files), os.cpu_count() or 1)
    estimate = -(-len(files) // workers) * _SECONDS_A_FILE[target[:3]]
    print(f"hip_ops: building kernels for {target} (once, about {estimate} s)", file=sys.stderr, flush=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=folder) as scratch:
        objects = [Path(scratch) / f"{file.stem}.o" for file in files]
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(_run, map(compiler.compile_command, files, objects)))
        library = Path(scratch) / LIBRARY
        _run(compiler.link_command(objects, library))
        manifest = {
            "target": target,
            "sources": sources_digest(sources),
            "sha256": hashlib.sha256(library.read_bytes()).hexdigest(),
            "compiler": compiler.version.splitlines()[0],
            "command": shlex.join(compiler.compile_command(Path("FILE.hip"), Path("FILE.o"))),
        }
        written = Path(scratch) / MANIFEST
        written.write_text(json.dumps(manifest, indent=1))
        os.replace(library, folder / LIBRARY)
        os.replace(written, folder / MANIFEST)
    print(f"hip_ops: built in {time.monotonic() - started:.0f} s: {folder / LIBRARY}", file=sys.stderr, flush=True)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode != 0:
        raise BuildError(
            f"hip_ops: this command failed with code {done.returncode}:\n  "
            f"{shlex.join(command)}\n{done.stdout.rstrip()}"
        )
