# SPDX-License-Identifier: Apache-2.0
"""Makes ROCm's device libraries (LLVM bitcode) for gfx942 of an older set, for a clang without a ROCm installation.

Debian 12 has ROCm 5.2, whose bitcode knows gfx940 but not gfx942; clang then refuses to compile for it. The missing
file holds only the number of the architecture. It is made from gfx940's file, in a folder of links to the other files.
"""

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

GFX942 = "oclc_isa_version_942.bc"


def with_gfx942(folder: Path, cache: Path, require: Callable[[str], str]) -> Path:
    """Return `folder` if it holds gfx942's file, else a folder below `cache` that does, made at the first call.

    require: name of a program -> its path.
    """
    if (folder / GFX942).is_file():
        return folder
    overlay = cache / f"bitcode-{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
    if (overlay / GFX942).is_file():
        return overlay
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        staging = Path(temporary) / "bitcode"
        staging.mkdir()
        for library in folder.glob("*.bc"):
            (staging / library.name).symlink_to(library)
        command = [require("llvm-dis-19"), str(folder / "oclc_isa_version_940.bc"), "-o", "-"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        changed, count = re.subn(r"\bi32 9400\b", "i32 9402", text)
        assert count == 1, f"{folder}/oclc_isa_version_940.bc does not hold its number once"
        subprocess.run([require("llvm-as-19"), "-", "-o", str(staging / GFX942)], input=changed, check=True, text=True)
        try:
            staging.rename(overlay)
        except OSError:
            assert (overlay / GFX942).is_file()  # another process made it meanwhile
    return overlay
