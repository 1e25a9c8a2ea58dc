# SPDX-License-Identifier: Apache-2.0
"""Test the checks of `zaya doctor`: installed packages, missing ones with their source, hosts, devices, kernels, host
changes and known problems; and one report of this environment.
"""

import json
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hip_ops import use_kernels
from hip_ops.runtime import launchers, operator
from hip_ops.runtime.build import library_note
from hip_ops.runtime.code_objects import objects_note
from tests.running import zaya
from zaya_plugin.machines import installed
from zaya_plugin.machines.check_process import examine
from zaya_plugin.machines.checks import CHECKS, Setting
from zaya_plugin.patches import hooks

CPU_SETTING = Setting("cpu", 0, "CPU x86_64", Path("unused"), chosen="cpu")


def details(name: str) -> str:
    return "\n".join(examine(CHECKS[name], CPU_SETTING).details)


@pytest.mark.slow  # a process of its own imports torch and Megatron
def test_this_environment_is_described_in_json():
    done = zaya("doctor", "--json")
    record = json.loads(done.stdout)
    figures = {entry["check"]: entry["figures"] for entry in record["checks"]}
    assert done.returncode == 0, "these tests run where training can"
    assert figures["packages"]["versions"]["torch"] == metadata.version("torch")
    assert set(figures["packages"]["versions"]) == {"torch", "megatron-core", "transformers", "triton"}
    assert set(figures["optional_packages"]["versions"]) == {"wandb", "transformer-engine", "aiter"}
    assert figures["hosts"]["possible"] == ["zaya train", "pretrain_gpt.py --spec"]
    assert figures["devices"]["cpu_cores"] >= 1
    for problem in figures["known_problems"]["problems"]:
        assert set(problem) == {"name", "severity", "evidence", "why", "remedy", "thread"}


def test_kernels_and_host_changes_of_this_environment():
    with use_kernels("auto"):  # a recipe of another test in this process may have set another
        figures = installed.kernels(CPU_SETTING).figures
    assert figures["cpu"] == ["all operators  reference (kernels=auto)"]
    of_triton = f"kernels of triton: {objects_note('gfx942')}"
    assert figures["gfx942"] == [f"library of hip: {library_note('gfx942')}", of_triton]
    outcome = installed.host_changes(CPU_SETTING)
    assert outcome.reason == f"{len(installed.patches())} patches, {len(hooks.describe())} hooks"
    assert len(outcome.details) == 2 + 3 * (len(installed.patches()) + len(hooks.describe()))
    assert {patch.scope for patch in installed.patches()} <= {"cpu", "always"}


def test_the_library_is_that_of_the_device(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.2")
    monkeypatch.setattr(launchers, "architecture", lambda device: "gfx950")
    monkeypatch.setattr(operator, "report", lambda name, check: [])
    figures = installed.kernels(Setting("cuda", 1, "AMD Instinct MI355X", Path("unused"))).figures
    of_triton = f"kernels of triton: {objects_note('gfx950')}"
    assert figures["gfx950"] == [f"library of hip: {library_note('gfx950')}", of_triton] and "gfx942" not in figures


def test_people_read_devices_and_changes(monkeypatch):
    accelerators = [dict(index=0, name="MI300X", memory_gib=192, arch="gfx942")]
    devices = dict(built_for="ROCm 6.4", cpu_cores=8, accelerators=accelerators)
    monkeypatch.setattr(installed, "torch_devices", lambda: devices)
    monkeypatch.setattr(installed, "sums_of_gradients", lambda: "addmm")
    outcome = installed.devices(CPU_SETTING)
    assert (outcome.reason, outcome.details) == (
        "torch is built for ROCm 6.4; 8 CPU cores",
        ["0: MI300X, 192 GiB, gfx942", "fp32 weight gradients, way_of_adding: addmm"],
    )
    devices["accelerators"] = []
    outcome = installed.devices(CPU_SETTING)
    assert outcome.details[-1].endswith("not known without a device") and len(outcome.details) == 2
    reasons = dict(reason="because", until="callbacks exist", upstream="https://there")
    range_of = dict(scope="cpu", package="megatron-core", versions=">=2.6")
    patch = SimpleNamespace(symbol="a.b", applies=False, **reasons, **range_of)
    monkeypatch.setattr(installed, "patches", lambda: [patch])
    text = details("host_changes")
    assert "unused    a.b  (cpu, megatron-core >=2.6)\n          because; until callbacks exist\n" in text
    assert "replaced during a run, and restored\nmegatron" in text


def test_kernels_that_are_not_available():
    with use_kernels("compiled"):
        (line,) = installed.kernels(CPU_SETTING).figures["cpu"]
    assert "is not available on cpu: torch.compile is not used on a CPU" in line


def test_a_missing_package_comes_with_its_source(monkeypatch):
    monkeypatch.setattr(installed, "versions", lambda: {name: None for name, *_ in installed.PACKAGES})
    assert "aiter               not installed" in details("optional_packages")
    assert "github.com/ROCm/aiter" in details("optional_packages") and "aiter" not in details("packages")


def test_a_package_that_does_not_exist_has_no_version():
    assert installed.version_of("no-such-distribution", "no_such_module.inside") is None
    assert installed.version_of("hydra-core", "hydra") == metadata.version("hydra-core")


def test_a_torch_that_cannot_be_imported_is_reported(monkeypatch):
    def broken():
        raise OSError("libamdhip64.so.6: cannot open shared object file")

    monkeypatch.setattr(installed, "torch_devices", broken)
    outcome = examine(CHECKS["devices"], CPU_SETTING)
    assert outcome.state == "wrong" and outcome.reason.startswith("OSError: libamdhip64.so.6: cannot open")
    assert installed.patches() == []
