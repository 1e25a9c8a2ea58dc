# SPDX-License-Identifier: Apache-2.0
"""The mount of a path, the network behind it, and files of /proc and /sys. `root` is the folder that holds both."""

import re
import socket
from pathlib import Path

ROOT = Path("/")


def network_of(folder: Path, root: Path) -> tuple[str, str, bool]:
    """Return the type of the file system of `folder`, the network that its accesses take ("" for a local or unknown
    file system), and whether that is the training network. root: folder with sys/ and proc/.
    """
    kind, source, options = mount_of(folder, root)
    if "@o2ib" in source:
        return kind, f"{kind} over InfiniBand (o2ib), as the collectives", True
    address = re.search(r"\baddr=([\d.]+)", options) or re.match(r"([\d.]+)[@:]", source)
    if address is None or (interface := interface_of(address[1], root)) is None:
        return kind, "", False
    shared = interface in rail_interfaces(root)
    text = f"{kind} of {address[1]} over {interface}" + ", a rail of the training network" * shared
    return kind, text, shared


def rail_interfaces(root: Path) -> set[str]:
    """Return the network interfaces of the training network's ports."""
    return {read(path) for path in (root / "sys/class/infiniband").glob("*/ports/*/gid_attrs/ndevs/0")} - {""}


def mount_of(path: Path, root: Path) -> tuple[str, str, str]:
    """Return type, source and options of the mount that holds `path`."""
    mount = ("", "", "")
    best = -1
    for line in read(root / "proc/self/mountinfo").splitlines():
        left, _, right = line.partition(" - ")
        point, after = left.split()[4].replace("\\040", " "), right.split()
        if len(after) == 3 and path.is_relative_to(point) and len(point) >= best:
            best, mount = len(point), (after[0], after[1], after[2])
    return mount


def interface_of(address: str, root: Path) -> str | None:
    """Return the interface of the route to an IPv4 address."""
    try:
        number = int.from_bytes(socket.inet_aton(address), "little")
    except OSError:
        return None
    routes = [line.split() for line in read(root / "proc/net/route").splitlines()[1:]]
    fitting = [(int(words[7], 16), words[0]) for words in routes if number & int(words[7], 16) == int(words[1], 16)]
    return max(fitting, key=lambda entry: entry[0].bit_count(), default=(0, None))[1]


def read(path: Path) -> str:
    """Return a file of /sys or /proc, "" where it is absent."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
