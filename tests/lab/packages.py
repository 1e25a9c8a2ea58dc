# SPDX-License-Identifier: Apache-2.0
"""Programs of Debian packages, downloaded by name and unpacked into the cache of the lab; nothing is installed."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

NFT = ("nftables", "libnftables1", "libnftnl11")
SLURM = ("slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "libhwloc15", "liblua5.1-0", "libmunge2")


class Unpacked:
    """A folder with unpacked packages."""

    def __init__(self, root: Path):
        self.root = root
        self.libraries = [path for path in (root / "usr/lib").glob("*-linux-gnu*") if path.is_dir()]

    def program(self, name: str) -> Path:
        """Return the path of a program."""
        return next(path for path in (self.root / "usr/sbin" / name, self.root / "usr/bin" / name) if path.exists())

    def environment(self, base: Mapping[str, str] = os.environ) -> dict[str, str]:
        """Return `base` with the paths of the unpacked programs and libraries."""
        folders = [*self.libraries, *(folder / "slurm-wlm" for folder in self.libraries)]
        programs = [self.root / "usr/sbin", self.root / "usr/bin"]
        return {
            **base,
            "LD_LIBRARY_PATH": ":".join([*map(str, folders), base.get("LD_LIBRARY_PATH", "")]).rstrip(":"),
            "PATH": ":".join([*map(str, programs), base.get("PATH", "")]),
        }

    def run(self, *words: str | Path) -> str:
        """Run a program with this environment and return its output. Raises OSError if it fails."""
        result = subprocess.run(
            [str(word) for word in words], env=self.environment(), capture_output=True, text=True, timeout=60
        )
        if result.returncode:
            raise OSError(f"{' '.join(map(str, words))}: {(result.stderr or result.stdout).strip()}")
        return result.stdout


def unpack(cache: Path, names: Sequence[str], program: str, download: bool = True) -> Unpacked:
    """Return the folder with the packages `names`, downloaded if `program` is not there yet. Raises OSError."""
    root, files = cache / "root", cache / "packages"
    if not any((root / folder / program).exists() for folder in ("usr/sbin", "usr/bin")):
        if not download:
            raise OSError(f"{program} is not unpacked, and nothing is downloaded (--no-download)")
        files.mkdir(parents=True, exist_ok=True)
        # as root, apt changes to a user that cannot write to this folder
        words = ["apt-get", "-o", "APT::Sandbox::User=root", "download", *names]
        try:
            result = subprocess.run(words, cwd=files, capture_output=True, text=True, timeout=180)
        except (FileNotFoundError, subprocess.TimeoutExpired) as error:
            raise OSError(f"the packages of {program} cannot be downloaded ({error})") from None
        if result.returncode:
            raise OSError(f"the packages of {program} cannot be downloaded: {result.stderr.strip().splitlines()[-1]}")
        for name in names:
            for path in sorted(files.glob(f"{name}_*.deb")):
                subprocess.run(["dpkg", "-x", str(path), str(root)], check=True, capture_output=True)
    return Unpacked(root)
