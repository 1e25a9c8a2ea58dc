# SPDX-License-Identifier: Apache-2.0
"""The line `rates`: a copy and a large matrix product on every device of the machine."""

from __future__ import annotations

from zaya_plugin.bench import probes
from zaya_plugin.verify.expected import SLOW_BELOW, described, machine_of
from zaya_plugin.verify.line import Outcome, Setting


def wrong_numbers(device, dtype) -> list[str]:
    """Return what differs in a product and a copy whose results are known exactly: a device with bad memory."""
    import torch

    extent, numbers = probes.ON_CPU[0] if device.type == "cpu" else probes.ON_ACCELERATOR[0], 2**24
    ones = torch.ones(extent, extent, device=device, dtype=dtype)
    bad = int((torch.mm(ones, ones) != extent).sum())
    source = torch.arange(numbers, device=device)
    moved = int((source.clone().cpu() != torch.arange(numbers)).sum())
    product = [f"{bad:,} of {extent**2:,} elements of a product of ones are not {extent}"] if bad else []
    return product + ([f"{moved:,} of {numbers:,} numbers of a copy differ"] if moved else [])


def rates(setting: Setting) -> Outcome:
    import torch

    dtype = torch.float32 if setting.on_cpu else torch.bfloat16
    devices = [torch.device("cpu")] if setting.on_cpu else [torch.device("cuda", i) for i in range(setting.devices)]
    by_device = {}
    for device in devices:
        setting.say(str(device))
        measured = probes.measure(device, dtype)
        by_device[str(device)] = {"gemm_tflops": measured.gemm / 1e12, "copy_tb_per_s": measured.copy / 1e12}
        by_device[str(device)]["wrong"] = wrong_numbers(device, dtype)
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
    worst = {key: min(entry[key] for entry in by_device.values()) for key in ("gemm_tflops", "copy_tb_per_s")}
    text = f"copy {worst['copy_tb_per_s']:.3g} TB/s, matrix product {worst['gemm_tflops']:.4g} TFLOP/s"
    text += f", the slowest of {len(devices)} devices" if len(devices) > 1 else ""
    text += "" if machine else "; no expectation for this device"
    return Outcome("slow" if slow else "pass", "; ".join(slow) or text, by_device, described(machine, **expected))
