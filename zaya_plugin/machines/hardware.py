# SPDX-License-Identifier: Apache-2.0
"""The checks `rates`, `links` and `storage`: matrix products and copies of every device, the state of ports, PCIe links
and error counters, and a synced write.
"""

import re
import resource
import shutil
import tempfile
from pathlib import Path

from zaya_plugin.bench import probes
from zaya_plugin.bench.storage import written
from zaya_plugin.ground.mounts import ROOT, network_of, rail_interfaces, read
from zaya_plugin.machines.checks import Outcome, Setting
from zaya_plugin.machines.expected import SLOW_BELOW, described
from zaya_plugin.plan.known_machine import machine_of

STORAGE_MIB = 64


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


def storage(setting: Setting, root: Path = ROOT) -> Outcome:
    """Measure a synced write, and say whether the storage's traffic goes over a rail of the training network."""
    folder = setting.storage
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            rate = written(file.fileno(), STORAGE_MIB * 2**20) / 1e6
    except OSError as error:
        return Outcome("wrong", f"{folder} cannot be written: {error}")
    figures = {"folder": str(folder), "network": network_of(folder, root)[1]}
    details = [f"storage {folder}: {figures['network']}"] if figures["network"] else []
    compared = {"storage_mb_per_s": {"": rate}}
    return Outcome("pass", f"{rate:.0f} MB/s to {folder}", figures, details=details, compared=compared)


def limits(root: Path) -> dict[str, int | None]:
    """Return the bytes that a process may lock and those of /dev/shm; None: no limit, or unknown."""
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    shm = root / "dev/shm"
    return {
        "memlock_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "shm_bytes": shutil.disk_usage(shm).total if shm.is_dir() else None,
    }
