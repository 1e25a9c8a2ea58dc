# SPDX-License-Identifier: Apache-2.0
"""What this machine allows: each means of the lab is tried, not guessed, and what is absent has a reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.lab.packages import NFT, SLURM, Unpacked, unpack

CGROUP = Path("/sys/fs/cgroup")


class Absent(Exception):
    """A means of the lab is not available; the text says why."""


class Machine:
    """The means that were tried: `why[name]` is the reason for an absent one, None for a present one."""

    def __init__(self, cache: Path, download: bool = True):
        self.cache, self.download = cache, download
        self.why: dict[str, str | None] = {}
        self.nft: Unpacked | None = None
        for name, probe in PROBES.items():
            try:
                probe(self)
                self.why[name] = None
            except (Absent, OSError, subprocess.SubprocessError) as error:
                self.why[name] = str(error)

    def lacks(self, needs: tuple[str, ...]) -> list[str]:
        """Return the reasons for which something that needs `needs` cannot run."""
        return [f"{name}: {self.why[name]}" for name in needs if self.why[name] is not None]


def run(*words: str | Path, **options) -> subprocess.CompletedProcess:
    """Run a program of the system and return its result. Raises Absent if it fails."""
    try:
        done = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60, **options)
    except FileNotFoundError:
        raise Absent(f"{words[0]} is not installed") from None
    if done.returncode:
        raise Absent(f"{' '.join(map(str, words))}: {(done.stderr or done.stdout).strip() or done.returncode}")
    return done


def _root(machine: Machine) -> None:
    if os.geteuid() != 0:
        raise Absent("needs root")


def _linux(machine: Machine) -> None:
    if not sys.platform.startswith("linux"):
        raise Absent("needs Linux")


def _network(machine: Machine) -> None:
    _root(machine)
    name = f"zlab{os.getpid()}-t"
    run("ip", "netns", "add", name)
    try:
        run("ip", "-n", name, "link", "add", "name", "bridge", "type", "bridge")
        run("ip", "-n", name, "link", "add", "name", "v0", "type", "veth", "peer", "name", "v1")
    finally:
        run("ip", "netns", "del", name)


def _nft(machine: Machine) -> None:
    if machine.why.get("network") is not None:
        raise Absent("needs network namespaces")
    machine.nft = unpack(machine.cache, NFT, "nft", machine.download)
    name = f"zlab{os.getpid()}-t"
    run("ip", "netns", "add", name)
    try:
        machine.nft.run("ip", "netns", "exec", name, machine.nft.program("nft"), "add", "table", "inet", "lab")
    finally:
        run("ip", "netns", "del", name)


def _cgroup(controller: str, file: str) -> Callable[[Machine], None]:
    def probe(machine: Machine) -> None:
        _root(machine)
        folder = CGROUP / controller
        if not folder.is_dir():
            raise Absent(f"no cgroup v1 controller {controller}")
        made = folder / f"zlab{os.getpid()}"
        made.mkdir()
        try:
            if not (made / file).exists():
                raise Absent(f"the cgroup controller {controller} has no {file}")
        finally:
            made.rmdir()

    return probe


def _tmpfs(machine: Machine) -> None:
    _root(machine)
    with tempfile.TemporaryDirectory() as folder:
        run("mount", "-t", "tmpfs", "-o", "size=64k", "zlab", folder)
        run("umount", folder)


def _freeze(machine: Machine) -> None:
    _root(machine)
    for program in ("mkfs.ext4", "losetup", "fsfreeze"):
        if shutil.which(program) is None:
            raise Absent(f"{program} is not installed")
    with tempfile.TemporaryDirectory() as folder:
        image, point = Path(folder) / "image", Path(folder) / "mount"
        point.mkdir()
        with open(image, "wb") as file:
            file.truncate(8 << 20)
        run("mkfs.ext4", "-q", image)
        run("mount", "-o", "loop", image, point)
        try:
            run("fsfreeze", "-f", point)
            run("fsfreeze", "-u", point)
        finally:
            run("umount", point)


def _compiler(machine: Machine) -> None:
    if shutil.which("cc") is None:
        raise Absent("no C compiler")


def _kernel_log(machine: Machine) -> None:
    with open("/dev/kmsg", "rb"):
        pass


def _slurm(machine: Machine) -> None:
    _root(machine)
    unpack(machine.cache, SLURM, "slurmctld-wlm", machine.download)


# name -> how it is tried; a probe raises Absent or OSError
PROBES: dict[str, Callable[[Machine], None]] = {
    "linux": _linux,
    "root": _root,
    "network": _network,
    "nft": _nft,
    "freezer": _cgroup("freezer", "freezer.state"),
    "memory": _cgroup("memory", "memory.limit_in_bytes"),
    "cpu": _cgroup("cpu", "cpu.cfs_quota_us"),
    "tmpfs": _tmpfs,
    "freeze": _freeze,
    "compiler": _compiler,
    "kernel_log": _kernel_log,
    "slurm": _slurm,
}
MEANS = {
    "linux": "Linux: /proc, signals",
    "root": "the rights of root",
    "network": "network namespaces with veth links on a bridge",
    "nft": "packet loss by nft",
    "freezer": "cgroup v1 freezer: a process that SIGKILL does not end",
    "memory": "cgroup v1 memory limit: a real out-of-memory kill",
    "cpu": "cgroup v1 CPU quota: a slow rank",
    "tmpfs": "tmpfs with a size: a full disk",
    "freeze": "ext4 on a loop device, frozen by fsfreeze: a mount that does not answer",
    "compiler": "a C compiler: EIO by a preloaded library",
    "kernel_log": "/dev/kmsg: the kernel's own messages",
    "slurm": "SLURM from Debian's packages, unpacked",
}
