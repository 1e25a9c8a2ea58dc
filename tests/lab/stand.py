# SPDX-License-Identifier: Apache-2.0
"""The nodes, mounts and cgroups of the lab. All of them are removed at the end, also after Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.lab.machine import CGROUP, Absent, execute
from zaya_plugin.ground import processes

MARK = "ZAYA_LAB"  # in the environment of everything that a lab starts
PREFIX = "zlab"
LINK = "eth0"
NODES = ("n1", "n2", "n3")


class Stand:
    """Nodes of one lab: network namespaces on a bridge, or, without root, plain groups of processes.

    Args:
        folder: of the lab; also marks its processes.
        names: of the nodes.
        network: whether the nodes are network namespaces.
    """

    def __init__(self, folder: Path, names: tuple[str, ...], network: bool):
        self.folder, self.names, self.network = folder, names, network
        self.stack = contextlib.ExitStack()
        self.base = f"{PREFIX}{os.getpid()}"

    def __enter__(self) -> Stand:
        try:
            if self.network:
                remove_leftovers()
                self._namespaces()
            # short, since sockets are made in it; removed after the processes have ended
            temporary = tempfile.TemporaryDirectory(prefix="zaya_lab_", ignore_cleanup_errors=True)
            self.temporary = Path(self.stack.enter_context(temporary))
            self.stack.callback(self.kill)
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def address(self, node: str) -> str:
        """Return the address of a node."""
        return f"10.77.0.{self.names.index(node) + 1}" if self.network else "127.0.0.1"

    def words(self, node: str) -> list[str]:
        """Return the words that run a program on a node."""
        return ["ip", "netns", "exec", self.namespace(node)] if self.network else []

    def namespace(self, node: str) -> str:
        """Return the name of a node's network namespace."""
        return f"{self.base}-{node}"

    def environment(self) -> dict[str, str]:
        """Return what the lab adds to the environment of a node's programs."""
        network = {"GLOO_SOCKET_IFNAME": LINK} if self.network else {}
        state = str(self.folder / "state")
        return {MARK: str(self.folder), "TMPDIR": str(self.temporary), "XDG_STATE_HOME": state, **network}

    def _namespaces(self) -> None:
        switch = f"{self.base}-switch"
        for name in (switch, *map(self.namespace, self.names)):
            execute("ip", "netns", "add", name)
            self.stack.callback(subprocess.run, ["ip", "netns", "del", name], capture_output=True)
        execute("ip", "-n", switch, "link", "add", "name", "bridge", "type", "bridge")
        execute("ip", "-n", switch, "link", "set", "bridge", "up")
        for node in self.names:
            inside = self.namespace(node)
            execute(
                "ip", "-n", switch, "link", "add", "name", node, "type", "veth", "peer", "name", LINK, "netns", inside
            )
            execute("ip", "-n", switch, "link", "set", node, "master", "bridge")
            execute("ip", "-n", switch, "link", "set", node, "up")
            execute("ip", "-n", inside, "addr", "add", f"{self.address(node)}/24", "dev", LINK)
            execute("ip", "-n", inside, "link", "set", "lo", "up")
            self.link(node, up=True)

    def link(self, node: str, up: bool) -> None:
        """Set the link of a node up or down, on the node's side."""
        execute("ip", "-n", self.namespace(node), "link", "set", LINK, "up" if up else "down")

    def processes(self) -> list[int]:
        """Return the living processes that this lab has started."""
        return processes.started_with(f"{MARK}={self.folder}")

    def kill(self) -> None:
        """End all processes of the lab; frozen ones are thawed first."""
        for path in (CGROUP / "freezer").glob(f"{self.base}-*/freezer.state"):
            path.write_text("THAWED")
        processes.kill_all(f"{MARK}={self.folder}", 20)

    @contextlib.contextmanager
    def cgroup(self, controller: str, pid: int, **values: object) -> Iterator[Path]:
        """Put a process into a new cgroup with these values; its processes go back at the end."""
        group = CGROUP / controller / f"{self.base}-{pid}"
        group.mkdir()
        try:
            for name, value in values.items():
                (group / f"{controller}.{name}").write_text(str(value))
            (group / "cgroup.procs").write_text(str(pid))
            yield group
        finally:
            if controller == "freezer":
                (group / "freezer.state").write_text("THAWED")
            for left in (group / "cgroup.procs").read_text().split():
                with contextlib.suppress(OSError):
                    (group.parent / "cgroup.procs").write_text(left)
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.1)

    @contextlib.contextmanager
    def tmpfs(self, point: Path, options: str) -> Iterator[Path]:
        """Mount a tmpfs with `options`, such as size=8m."""
        point.mkdir(parents=True)
        execute("mount", "-t", "tmpfs", "-o", options, f"{self.base}", point)
        try:
            yield point
        finally:
            self._unmount(point)

    @contextlib.contextmanager
    def disk(self, point: Path, megabytes: int) -> Iterator[Path]:
        """Mount a small ext4 file system on a loop device; it is thawed at the end."""
        point.mkdir(parents=True)
        image = point.with_suffix(".image")
        with open(image, "wb") as file:
            file.truncate(megabytes << 20)
        execute("mkfs.ext4", "-q", image)
        execute("mount", "-o", "loop", image, point)
        try:
            yield point
        finally:
            subprocess.run(["fsfreeze", "-u", str(point)], capture_output=True)
            self._unmount(point)
            image.unlink()

    def _unmount(self, point: Path) -> None:
        self.kill()  # a process that still has a file open there
        for _ in range(20):
            if subprocess.run(["umount", str(point)], capture_output=True).returncode == 0:
                return
            time.sleep(0.2)
        subprocess.run(["umount", "--lazy", str(point)], capture_output=True)


def remove_leftovers() -> None:
    """Remove the namespaces, cgroups and mounts of labs that were killed."""
    with contextlib.suppress(Absent):
        for line in execute("ip", "netns", "list").stdout.splitlines():
            if _has_no_owner(name := line.split()[0]):
                subprocess.run(["ip", "netns", "del", name], capture_output=True)
    for group in CGROUP.glob(f"*/{PREFIX}*"):
        if _has_no_owner(group.name):
            with contextlib.suppress(OSError):
                group.rmdir()
    for line in Path("/proc/mounts").read_text().splitlines():
        device, point = line.split()[:2]
        if _has_no_owner(device):
            subprocess.run(["umount", "--lazy", point], capture_output=True)


def _has_no_owner(name: str) -> bool:
    """Return whether the lab that made `name` has ended."""
    pid = name.removeprefix(PREFIX).partition("-")[0]
    return name.startswith(PREFIX) and pid.isdigit() and not os.path.exists(f"/proc/{pid}")


def new_folder(folder: Path) -> Path:
    """Make an empty folder, in place of an earlier one, and return it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
