# SPDX-License-Identifier: Apache-2.0
"""The means of the lab on this machine: each is tried, not guessed, and an absent one has a reason."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.lab.packages import NFT, SLURM, Unpacked, unpack

CGROUP = Path("/sys/fs/cgroup")


class Absent(Exception):
    """A means of the lab is not available; the text says why."""


class Machine:
    """The means that were tried: `reasons[name]` is why one is absent, None for a present one."""

    def __init__(self, cache: Path, download: bool = True):
        self.cache, self.download = cache, download
        self.reasons: dict[str, str | None] = {}
        self.nft: Unpacked | None = None
        for name, (_, probe) in MEANS.items():
            try:
                probe(self)
                self.reasons[name] = None
            except (Absent, OSError, subprocess.SubprocessError) as error:
                self.reasons[name] = str(error)

    @property
    def network(self) -> bool:
        """Whether nodes can be network namespaces."""
        return self.reasons["network"] is None

    def lacks(self, needs: tuple[str, ...]) -> list[str]:
        """Return the reasons for which something that needs `needs` cannot run."""
        return [f"{name}: {self.reasons[name]}" for name in needs if self.reasons[name] is not None]


def execute(*words: str | Path, **options) -> subprocess.CompletedProcess:
    """Run a program of the system and return its result. Raises Absent if it fails."""
    try:
        result = subprocess.run([str(word) for word in words], capture_output=True, text=True, timeout=60, **options)
    except FileNotFoundError:
        raise Absent(f"{words[0]} is not installed") from None
    if result.returncode:
        raise Absent(f"{' '.join(map(str, words))}: {(result.stderr or result.stdout).strip() or result.returncode}")
    return result


@contextlib.contextmanager
def _namespace() -> Iterator[str]:
    """Make a network namespace and yield its name."""
    name = f"zlab{os.getpid()}-t"
    execute("ip", "netns", "add", name)
    try:
        yield name
    finally:
        execute("ip", "netns", "del", name)


def _root(machine: Machine) -> None:
    if os.geteuid() != 0:
        raise Absent("needs root")


def _linux(machine: Machine) -> None:
    if not sys.platform.startswith("linux"):
        raise Absent("needs Linux")


def _network(machine: Machine) -> None:
    _root(machine)
    with _namespace() as name:
        execute("ip", "-n", name, "link", "add", "name", "bridge", "type", "bridge")
        execute("ip", "-n", name, "link", "add", "name", "v0", "type", "veth", "peer", "name", "v1")


def _nft(machine: Machine) -> None:
    if not machine.network:
        raise Absent("needs network namespaces")
    machine.nft = unpack(machine.cache, NFT, "nft", machine.download)
    with _namespace() as name:
        machine.nft.run("ip", "netns", "exec", name, machine.nft.program("nft"), "add", "table", "inet", "lab")


def _cgroup(controller: str, file: str) -> Callable[[Machine], None]:
    def probe(machine: Machine) -> None:
        _root(machine)
        folder = CGROUP / controller
        if not folder.is_dir():
            raise Absent(f"no cgroup v1 controller {controller}")
        group = folder / f"zlab{os.getpid()}"
        group.mkdir()
        try:
            if not (group / file).exists():
                raise Absent(f"the cgroup controller {controller} has no {file}")
        finally:
            group.rmdir()

    return probe


def _tmpfs(machine: Machine) -> None:
    _root(machine)
    with tempfile.TemporaryDirectory() as folder:
        execute("mount", "-t", "tmpfs", "-o", "size=64k", "zlab", folder)
        execute("umount", folder)


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
        execute("mkfs.ext4", "-q", image)
        execute("mount", "-o", "loop", image, point)
        try:
            execute("fsfreeze", "-f", point)
            execute("fsfreeze", "-u", point)
        finally:
            execute("umount", point)


def _compiler(machine: Machine) -> None:
    if shutil.which("cc") is None:
        raise Absent("no C compiler")


def _kernel_log(machine: Machine) -> None:
    with open("/dev/kmsg", "rb"):
        pass


def _slurm(machine: Machine) -> None:
    _root(machine)
    unpack(machine.cache, SLURM, "slurmctld-wlm", machine.download)


# name -> what it is, and its probe, which raises Absent or OSError
MEANS: dict[str, tuple[str, Callable[[Machine], None]]] = {
    "linux": ("Linux: /proc, signals", _linux),
    "root": ("the rights of root", _root),
    "network": ("network namespaces with veth links on a bridge", _network),
    "nft": ("packet loss by nft", _nft),
    "freezer": ("cgroup v1 freezer: a process that SIGKILL does not end", _cgroup("freezer", "freezer.state")),
    "memory": ("cgroup v1 memory limit: a real out-of-memory kill", _cgroup("memory", "memory.limit_in_bytes")),
    "cpu": ("cgroup v1 CPU quota: a slow rank", _cgroup("cpu", "cpu.cfs_quota_us")),
    "tmpfs": ("tmpfs with a size: a full disk", _tmpfs),
    "freeze": ("ext4 on a loop device, frozen by fsfreeze: a mount that does not answer", _freeze),
    "compiler": ("a C compiler: EIO by a preloaded library", _compiler),
    "kernel_log": ("/dev/kmsg: the kernel's own messages", _kernel_log),
    "slurm": ("SLURM from Debian's packages, unpacked", _slurm),
}
