# SPDX-License-Identifier: Apache-2.0
"""Finds ROCm's device libraries (LLVM bitcode) for a clang without a ROCm installation.

Debian 12 has ROCm 5.2, whose bitcode knows gfx940 but not gfx942; clang then refuses to compile for it. The missing
file holds only the number of the architecture. It is made from gfx940's file, in a folder of links to the other files.
"""

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

_DEBIAN = Path("/usr/lib/x86_64-linux-gnu/amdgcn/bitcode")


def find(target: str, clang: str, rocm_folders: list[Path]) -> Path | None:
    """Returns a folder for clang's `--rocm-device-lib-path`, or None."""
    for folder in (*(rocm / "amdgcn" / "bitcode" for rocm in rocm_folders), _DEBIAN):
        if (folder / f"oclc_isa_version_{target.removeprefix('gfx')}.bc").is_file():
            return folder
        if target == "gfx942" and (folder / "oclc_isa_version_940.bc").is_file():
            return _with_gfx942(folder, clang)
    return None


def _with_gfx942(folder: Path, clang: str) -> Path | None:
    from hip_ops.runtime.cache import cache_folder

    overlay = cache_folder() / "device-libs-gfx942"
    if (overlay / "oclc_isa_version_942.bc").is_file():
        return overlay
    suffix = re.search(r"-\d+$", clang)
    beside = os.pathsep.join((str(Path(os.path.realpath(clang)).parent), os.environ.get("PATH", "")))
    tools = [
        shutil.which(name + (suffix[0] if suffix else ""), path=beside) or shutil.which(name, path=beside)
        for name in ("llvm-dis", "llvm-as")
    ]
    if None in tools:
        return None
    overlay.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("*.bc"):
        link = overlay / file.name
        if not link.is_symlink():
            try:
                link.symlink_to(file)
            except FileExistsError:
                pass  # another process made it
    text = subprocess.run(
        [tools[0], str(folder / "oclc_isa_version_940.bc"), "-o", "-"], capture_output=True, text=True, check=True
    ).stdout
    with tempfile.TemporaryDirectory(dir=overlay) as scratch:
        made = Path(scratch) / "made.bc"
        subprocess.run(
            [tools[1], "-", "-o", str(made)], input=text.replace("i32 9400", "i32 9402"), text=True, check=True
        )
        os.replace(made, overlay / "oclc_isa_version_942.bc")
    return overlay
