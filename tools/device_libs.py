# SPDX-License-Identifier: Apache-2.0
"""Makes ROCm's device libraries (LLVM bitcode) for gfx942 and gfx950 of an older set, for a clang without a ROCm
installation.

Debian 12 has ROCm 5.2, whose bitcode knows gfx940 but neither of them; clang then refuses to compile for them. The
missing file holds only the number of the architecture. It is made from gfx940's file, in a folder of links to the other
files. gfx950 is compiled by a newer clang, which no longer links a constant that Debian's ocml reads (denormals are
kept); its file holds that constant too.
"""

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

DENORMALS_ARE_KEPT = "@__oclc_daz_opt = linkonce_odr protected local_unnamed_addr addrspace(4) constant i8 0, align 1\n"


def with_architecture(folder: Path, cache: Path, require: Callable[[str], str], architecture: str) -> Path:
    """Return `folder` if it holds the architecture's file, else a folder below `cache` that does, made at the first call.

    require: name of a program -> its path.
    """
    major, minor, stepping = number = architecture.removeprefix("gfx")
    wanted = f"oclc_isa_version_{number}.bc"
    if (folder / wanted).is_file():
        return folder
    name = hashlib.sha256(f"{folder} {architecture}".encode()).hexdigest()[:12]
    overlay = cache / f"bitcode-{name}"
    if (overlay / wanted).is_file():
        return overlay
    with tempfile.TemporaryDirectory(dir=cache) as temporary:
        staging = Path(temporary) / "bitcode"
        staging.mkdir()
        for library in folder.glob("*.bc"):
            (staging / library.name).symlink_to(library)
        command = [require("llvm-dis-19"), str(folder / "oclc_isa_version_940.bc"), "-o", "-"]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        changed, count = re.subn(r"\bi32 9400\b", f"i32 {major}{minor}{int(stepping, 16):02}", text)
        assert count == 1, f"{folder}/oclc_isa_version_940.bc does not hold its number once"
        changed += DENORMALS_ARE_KEPT if architecture == "gfx950" else ""
        subprocess.run([require("llvm-as-19"), "-", "-o", str(staging / wanted)], input=changed, check=True, text=True)
        try:
            staging.rename(overlay)
        except OSError:
            assert (overlay / wanted).is_file()  # another process was faster
    return overlay
