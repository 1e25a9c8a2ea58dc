# SPDX-License-Identifier: Apache-2.0
"""The checks `rates`, `links` and `storage`: matrix products and copies of every device, the state of ports, PCIe links
and error counters, and a synced write.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import socket
import time
from pathlib import Path

from zaya_plugin.bench import probes
from zaya_plugin.machines.checks import Outcome, Setting
from zaya_plugin.machines.expected import SLOW_BELOW, described
from zaya_plugin.plan.known_machine import machine_of

STORAGE_MIB = 64
ROOT = Path("/")


def rates(setting: Setting) -> Outcome:
    import torch

    dtype = torch.float32 if setting.on_cpu else torch.bfloat16
    devices = [torch.device("cpu")] if setting.on_cpu else [torch.device("cuda", i) for i in range(setting.devices)]
    by_device = {}
    for device in devices:
        setting.say(str(device))
        measured = probes.measure(device, dtype)
        by_device[str(device)] = {
            "gemm_tflops": measured.gemm / 1e12,
            "copy_tb_per_s": measured.copy / 1e12,
            "wrong": measured.wrong,
        }
    wrong = [f"{device}: {text}" for device, entry in by_device.items() for text in entry["wrong"]]
    if wrong:
        return Outcome("wrong", "; ".join(wrong), by_device)
    machine = machine_of(setting.name)
    slow, expected = [], {}
    if machine is not None:
        expected = {"gemm_tflops": machine.gemm_tflops, "copy_tb_per_s": machine.copy_tb_per_s}
        slow = [
            f"{device}: {key} {entry[key]:.3g}, expected {rate:.3g}"
            for device, entry in by_device.items()
            for key, rate in expected.items()
            if entry[key] < SLOW_BELOW * rate
        ]
    compared = {
        key: {device: entry[key] for device, entry in by_device.items()} for key in ("gemm_tflops", "copy_tb_per_s")
    }
    worst = {key: min(values.values()) for key, values in compared.items()}
    text = f"copy {worst['copy_tb_per_s']:.3g} TB/s, matrix product {worst['gemm_tflops']:.4g} TFLOP/s"
    text += f", the slowest of {len(devices)} devices" if len(devices) > 1 else ""
    text += "" if machine else "; no expectation for this device"
    state, reason = ("slow", "; ".join(slow)) if slow else ("pass", text)
    return Outcome(state, reason, by_device, described(machine, **expected), compared=compared)


def read(path: Path) -> str:
    """Return a file of /sys or /proc, "" where it is absent."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def links(setting: Setting, root: Path = ROOT) -> Outcome:
    """Read the state of the training network's ports (rails) and of PCIe links, and the counters of errors."""
    ports = sorted((root / "sys/class/infiniband").glob("*/ports/*"))
    states, problems, rates = {}, [], {}
    for port in ports:
        name, state, rate = f"{port.parts[-3]}/{port.name}", read(port / "state"), read(port / "rate")
        states[name] = f"{state} {rate}".strip()
        if "ACTIVE" not in state:
            problems.append(f"port {name} is {state or 'in an unknown state'}")
        elif gbit := re.match(r"[\d.]+", rate):
            rates[name] = float(gbit[0]) / 8
    for interface in sorted(rail_interfaces(root)):
        states[interface] = read(root / "sys/class/net" / interface / "operstate")
        if states[interface] != "up":
            problems.append(f"rail {interface} is {states[interface] or 'absent'}")
    for device in sorted((root / "sys/class/drm").glob("card[0-9]*/device")):
        width, most = read(device / "current_link_width"), read(device / "max_link_width")
        if width.isdecimal() and most.isdecimal() and 0 < int(width) < int(most):
            problems.append(f"{device.parent.name}: PCIe link of width {width} of {most}")
        for counter in sorted((device / "ras").glob("*_err_count")):
            if (match := re.search(r"ue: *(\d+)", read(counter))) and int(match[1]):
                block = counter.name.removesuffix("_err_count")
                problems.append(f"{device.parent.name}: {match[1]} uncorrectable errors in {block}")
    text = "; ".join(problems) or f"{len(ports)} ports of the training network"
    compared = {"rails": {"": float(len(ports))}} | ({"rail_gb_per_s": rates} if rates else {})
    return Outcome("wrong" if problems else "pass", text, {"links": states}, compared=compared)


def rail_interfaces(root: Path) -> set[str]:
    """Return the network interfaces of the training network's ports."""
    return {read(path) for path in (root / "sys/class/infiniband").glob("*/ports/*/gid_attrs/ndevs/0")} - {""}


def storage(setting: Setting, root: Path = ROOT) -> Outcome:
    """Measure a synced write, and say whether the storage's traffic goes over a rail of the training network."""
    folder = setting.storage
    path = folder / f".zaya-verify-{socket.gethostname()}-{os.getpid()}"
    try:
        block, begin = os.urandom(2**20), time.monotonic()
        with open(path, "wb") as file:
            for _ in range(STORAGE_MIB):
                file.write(block)
            os.fsync(file.fileno())
        rate = STORAGE_MIB * 2**20 / 1e6 / (time.monotonic() - begin)
    except OSError as error:
        return Outcome("wrong", f"{folder} cannot be written: {error}")
    finally:
        with contextlib.suppress(OSError):
            path.unlink()
    figures = {"folder": str(folder), "network": network_of(folder, root)}
    details = [f"storage {folder}: {figures['network']}"] if figures["network"] else []
    compared = {"storage_mb_per_s": {"": rate}}
    return Outcome("pass", f"{rate:.0f} MB/s to {folder}", figures, details=details, compared=compared)


def network_of(folder: Path, root: Path) -> str:
    """Return the network that the accesses to `folder` take, or "" for a local or unknown file system."""
    kind, source, options = mount_of(folder, root)
    if "@o2ib" in source:
        return f"{kind} over InfiniBand (o2ib), as the collectives"
    address = re.search(r"\baddr=([\d.]+)", options) or re.match(r"([\d.]+)[@:]", source)
    if address is None or (interface := interface_of(address[1], root)) is None:
        return ""
    shared = ", a rail of the training network" if interface in rail_interfaces(root) else ""
    return f"{kind} of {address[1]} over {interface}{shared}"


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


def limits(root: Path) -> dict[str, int | None]:
    """Return the bytes that a process may lock and those of /dev/shm; None: no limit, or unknown."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shm = root / "dev/shm"
    return {
        "memlock_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "shm_bytes": shutil.disk_usage(shm).total if shm.is_dir() else None,
    }


def interface_of(address: str, root: Path) -> str | None:
    """Return the interface of the route to an IPv4 address."""
    try:
        number = int.from_bytes(socket.inet_aton(address), "little")
    except OSError:
        return None
    routes = [line.split() for line in read(root / "proc/net/route").splitlines()[1:]]
    fitting = [(int(words[7], 16), words[0]) for words in routes if number & int(words[7], 16) == int(words[1], 16)]
    return max(fitting, key=lambda entry: entry[0].bit_count(), default=(0, None))[1]
