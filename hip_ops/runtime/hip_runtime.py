# SPDX-License-Identifier: Apache-2.0
"""Finds the HIP runtime (libamdhip64) that torch has mapped, and binds the kernels' library to it. Needs no torch.

A process must have one HIP runtime. With two, launches on the default stream work, and every other stream of torch is
unknown to the second runtime: error 709 (ROCm/mori#402, sgl-project/sglang#39513). So the shipped library names no
runtime of its own. Its symbols are found in the mapped one, after that was opened again with RTLD_GLOBAL.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from pathlib import Path

from hip_ops.errors import mistake

_FILE = re.compile(r"libamdhip64[^/]*\.so[^/]*$")
_NUMBER = re.compile(r"\.so\.(\d+)")
_SONAME = re.compile(rb"\0libamdhip64\.so\.(\d+)\0")


def own_maps() -> str:
    return Path("/proc/self/maps").read_text()


def mapped_runtimes(maps: str) -> list[Path]:
    """Return the files of HIP's runtime in the text of /proc/<id>/maps, each once."""
    paths = (line.split(maxsplit=5)[5] for line in maps.splitlines() if "libamdhip64" in line)
    return [Path(path) for path in dict.fromkeys(paths) if _FILE.search(path)]


def major_version(runtime: Path) -> int | None:
    """Return HIP's major version: of the file's name, otherwise of the SONAME inside it (torch's wheels drop the
    number from the name), otherwise None."""
    numbered = _NUMBER.search(runtime.name)
    if numbered:
        return int(numbered[1])
    try:
        with open(runtime, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            soname = _SONAME.search(content)
            return int(soname[1]) if soname else None
    except (OSError, ValueError):
        return None


def the_runtime(torch_hip: str, maps: str) -> Path:
    """Return the one HIP runtime of the process. Raises ValueError where there is none, more than one, or one of
    another major version than torch's.

    torch_hip: torch.version.hip. maps: text of /proc/self/maps.
    """
    required = int(torch_hip.split(".")[0])
    versions = {path: major_version(path) for path in mapped_runtimes(maps)}
    if len(versions) == 1 and set(versions.values()) <= {required, None}:
        return next(iter(versions))

    def described(path: Path, major: int | None) -> str:
        relation = "" if major is None else ", torch's version" if major == required else ", not torch's version"
        return f"{path} (HIP {major or 'unknown'}{relation})"

    listed = " and ".join(described(*entry) for entry in versions.items()) or "no HIP runtime"
    raise mistake(
        "libamdhip64",
        f"this process has mapped {listed}, and torch was built for HIP {torch_hip}",
        f"one HIP runtime, of major version {required}",
        f"let LD_LIBRARY_PATH and LD_PRELOAD name only a ROCm {required}, and reinstall for ROCm {required} the "
        "packages that load another one (`ldd FILE.so | grep amdhip64` shows what a library loads)",
    )


def bind(runtime: Path) -> None:
    """Open the mapped `runtime` again, so that libraries that are loaded later find its symbols. Raises OSError where
    it is not mapped."""
    ctypes.CDLL(str(runtime), mode=os.RTLD_GLOBAL | os.RTLD_NOLOAD)
