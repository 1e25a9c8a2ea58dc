# SPDX-License-Identifier: Apache-2.0
"""The measurements of one node in a preflight, by a program that its launcher starts there:

python -m zaya_plugin.aegis.preflight_node NODE OUTPUT DEVICE STORAGE
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from zaya_plugin.aegis.diagnose.evidence import printable
from zaya_plugin.ground.parent_death import die_with_parent
from zaya_plugin.ground.whole_file import write_whole

VERIFY = (sys.executable, "-m", "zaya_plugin.cli", "verify", "--only", "environment,rates,all_reduce")
STORAGE_MIB = 64
# AMD's codes in Primus-SaFE
CODES = {"devices": "004", "ras": "008", "pcie": "308", "port": "201", "ethernet": "202", "rails": "210"}


@dataclass
class Node:
    """The findings of one node. doing: what it had not ended. failures: [AMD's code or "", reason].

    name: of its devices. figures: name -> device or "" -> value. pairs: partner -> GB/s, None: it failed.
    """

    node: str
    doing: str = ""
    name: str = ""
    figures: dict[str, dict[str, float]] = field(default_factory=dict)
    failures: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    links: dict[str, str] = field(default_factory=dict)
    pairs: dict[str, float | None] = field(default_factory=dict)

    def fail(self, reason: str, code: str = "") -> None:
        self.failures.append([CODES.get(code, ""), printable(reason)])

    def keep(self, name: str, value: Any, device: str = "") -> None:
        if isinstance(value, (int, float)):
            self.figures.setdefault(name, {})[device] = float(value)

    def write(self, folder: Path, doing: str = "") -> None:
        """Write the report; it stays if what comes next hangs."""
        self.doing = doing
        write_whole(folder / f"{self.node}.json", json.dumps(asdict(self)))


def measure(node: Node, folder: Path, device: str, storage: Path, root: Path = Path("/")) -> None:
    """Examine this node, and write its report after each part."""
    node.write(folder, "zaya verify")
    out = folder / f"{node.node}.verify.json"
    out.unlink(missing_ok=True)
    code = subprocess.run([*VERIFY, "--device", device, "--out", str(out)], preexec_fn=die_with_parent).returncode
    try:
        take_verify(node, json.loads(out.read_text()))
    except (OSError, ValueError, KeyError) as error:
        node.fail(f"zaya verify left no record (exit code {code}, {type(error).__name__}); see {node.node}.log")
    node.write(folder, "links")
    rails = look_at_links(node, root)
    node.write(folder, f"writing {STORAGE_MIB} MiB to {storage}")
    look_at_storage(node, storage, rails, root)
    node.write(folder)


def take_verify(node: Node, record: Mapping[str, Any]) -> None:
    """Take over a verify.json."""
    node.name = str(record["machine"].get("name", ""))
    if not record["complete"]:
        node.fail("zaya verify did not come to its end")
    for line in record["lines"]:
        name, reason, figures = line["line"], line["reason"], line["figures"]
        if line["state"] == "wrong":
            missing = name == "environment" and re.search(r"\d+ of \d+ devices|finds no device", reason)
            node.fail(f"{name}: {reason}", "devices" if missing else "")
        elif line["state"] == "slow":  # the expected rates of some devices are predictions
            node.notes.append(printable(f"{name}: {reason}"))
        if name == "rates":
            for device, rates in figures.items():
                for figure in ("gemm_tflops", "copy_tb_per_s"):
                    node.keep(figure, rates.get(figure), device)
        elif name == "all_reduce" and figures.get("sizes"):
            node.keep("all_reduce_gb_per_s", figures["sizes"][-1]["gb_per_s"])


def read(path: Path) -> str:
    """Return a file of /sys or /proc, "" where it is absent."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def look_at_links(node: Node, root: Path) -> set[str]:
    """Read the state of rails, PCIe links and error counters; return the interfaces of the training network."""
    rails = set()
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    node.keep("rails", len(ports))
    for port in ports:
        name, state, rate = f"{port.parts[-3]}/{port.name}", read(port / "state"), read(port / "rate")
        interface = read(port / "gid_attrs/ndevs/0")
        node.links[name] = f"{state} {rate} {interface}".strip()
        if "ACTIVE" not in state:
            node.fail(f"port {name} is {state or 'in no known state'}", "port")
        elif gbit := re.match(r"[\d.]+", rate):
            node.keep("rail_gb_per_s", float(gbit[0]) / 8, name)
        if interface:
            rails.add(interface)
            carrier = read(root / "sys/class/net" / interface / "operstate")
            node.links[interface] = carrier
            if carrier != "up":
                node.fail(f"rail {interface} is {carrier or 'absent'}", "ethernet")
    for device in sorted((root / "sys/class/drm").glob("card[0-9]*/device")):
        width, most = read(device / "current_link_width"), read(device / "max_link_width")
        if width.isdecimal() and most.isdecimal() and 0 < int(width) < int(most):
            node.fail(f"{device.parent.name}: PCIe link of width {width} of {most}", "pcie")
        for counter in sorted((device / "ras").glob("*_err_count")):
            if (match := re.search(r"ue: *(\d+)", read(counter))) and int(match[1]):
                block = counter.name.removesuffix("_err_count")
                node.fail(f"{device.parent.name}: {match[1]} uncorrectable errors in {block}", "ras")
    return rails


def look_at_storage(node: Node, folder: Path, rails: set[str], root: Path) -> None:
    """Measure a synced write, and say whether the storage's traffic goes over a rail of the training network."""
    path = folder / f".preflight.{node.node}"
    try:
        block, begun = os.urandom(2**20), time.monotonic()
        with open(path, "wb") as file:
            for _ in range(STORAGE_MIB):
                file.write(block)
            os.fsync(file.fileno())
        node.keep("storage_mb_per_s", STORAGE_MIB * 2**20 / 1e6 / (time.monotonic() - begun))
    except OSError as error:
        node.fail(f"{folder} cannot be written: {error}")
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    kind, source, options = mount_of(folder, root)
    address = re.search(r"\baddr=([\d.]+)", options) or re.match(r"([\d.]+)[@:]", source)
    if "@o2ib" in source:
        node.notes.append(f"storage {folder}: {kind} over InfiniBand (o2ib), as the collectives")
    elif address is not None and (interface := interface_of(address[1], root)) is not None:
        shared = ", a rail of the training network" if interface in rails else ""
        node.notes.append(f"storage {folder}: {kind} of {address[1]} over {interface}{shared}")


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


if __name__ == "__main__":
    measure(Node(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
