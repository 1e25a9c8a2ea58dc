# SPDX-License-Identifier: Apache-2.0
"""Test the lines `environment`, `known_problems`, `rates` and `hazards`, each with its injected fault."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hip_ops.runtime import build, hazards, launchers
from tests.gfx942.assembly_kernel import HEAD, TAIL
from tests.gfx942.toolchain import assemble
from zaya_plugin import doctor
from zaya_plugin.bench import probes
from zaya_plugin.verify import environment, rates
from zaya_plugin.verify.expected import machine_of, named
from zaya_plugin.verify.line import Setting

HERE = Setting("cpu", 0, "CPU x86_64", Path("unused"), chosen="cpu")
REPORT = {
    "packages": [{"name": "torch", "version": "2.9", "use": "needed"}],
    "devices": {"built_for": "ROCm 7.1"},
    "patches": [],
    "problems": [],
}
MAPS = "7f00-7f01 r-xp 0 00:00 1    /opt/rocm-6.4/lib/libamdhip64.so.6\n"
OTHER = "7f02-7f03 r-xp 0 00:00 2    /venv/torch/lib/libamdhip64.so.7\n"


@pytest.fixture(autouse=True)
def reported(monkeypatch):
    """A doctor's report without an examination; the test may change it."""
    report = {**REPORT, "packages": [dict(REPORT["packages"][0])], "problems": []}
    environment.doctor_report.cache_clear()
    monkeypatch.setattr(doctor, "examine", lambda: report)
    monkeypatch.setattr(launchers, "own_maps", lambda: "")  # tests before this may have mapped a libamdhip64
    yield report
    environment.doctor_report.cache_clear()


def test_the_environment_of_this_machine(monkeypatch):
    monkeypatch.setenv("ZAYA_API_KEY", "abc")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    found = environment.environment(HERE)
    assert found.state == "pass" and "library gfx942 as shipped" in found.reason
    assert found.figures["variables"]["NCCL_DEBUG"] == "WARN" and "abc" not in str(found.figures)
    objects = found.figures["code_objects"]
    assert len(objects) > 10 and all(len(each) == 64 for each in objects)
    assert build.manifest_of(build.shipped("gfx942")[0])["sha256"] in found.figures["library"]
    assert found.figures["hip_runtimes"] == []


@pytest.mark.parametrize("hip", ["7.1.2", "6.4.1"])
def test_two_hip_runtimes_are_wrong(monkeypatch, hip):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(launchers, "own_maps", lambda: MAPS + OTHER)
    found = environment.environment(HERE)
    assert found.state == "wrong" and "rocm-6.4" in found.reason and "/venv/torch/lib" in found.reason
    assert len(found.figures["hip_runtimes"]) == 2
    monkeypatch.setattr(launchers, "own_maps", lambda: MAPS if hip[0] == "6" else OTHER)
    assert environment.environment(HERE).state == "pass"


@pytest.mark.parametrize("built_for", ["hip", "cuda", None])
def test_a_torch_for_gpus_that_finds_none_is_wrong(monkeypatch, built_for):
    for name in ("hip", "cuda"):
        monkeypatch.setattr(torch.version, name, "7.1" if name == built_for else None)
    monkeypatch.setattr(launchers, "own_maps", lambda: OTHER if built_for == "hip" else "")
    found = environment.environment(replace(HERE, chosen="auto"))
    assert found.state == ("wrong" if built_for else "pass")
    assert ("7.1 and finds no device" in found.reason and "--device cpu" in found.reason) == (built_for is not None)
    assert environment.environment(HERE).state == "pass", "--device cpu"


@pytest.mark.parametrize(
    ("name", "devices", "visible", "reason"),
    [
        ("AMD Instinct MI300X", 8, {}, None),
        (
            "AMD Instinct MI300X",
            7,
            {},
            "7 of 8 devices found (MI300X). To examine these alone: CUDA_VISIBLE_DEVICES=0,1,2,",
        ),
        ("AMD Instinct MI300X", 2, {"HIP_VISIBLE_DEVICES": "0,1"}, None),
        ("AMD Instinct MI300X", 1, {"HIP_VISIBLE_DEVICES": "0,1"}, "1 of 2 devices"),
        ("AMD Instinct MI300X", 2, {"ROCR_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "0,1"}, None),
        ("NVIDIA H200", 1, {}, "1 of 8 devices found (H200)"),
        ("NVIDIA B300", 1, {}, None),
    ],
)
def test_a_machine_with_fewer_devices_than_its_recipe_is_wrong(monkeypatch, name, devices, visible, reason):
    for variable in environment.VISIBLE:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in visible.items():
        monkeypatch.setenv(variable, value)
    found = environment.environment(Setting("cuda", devices, name, Path("unused")))
    assert found.state == ("wrong" if reason else "pass")
    assert reason is None or found.reason.startswith(reason), found.reason


def test_a_hip_runtime_beside_another_torch_is_wrong(monkeypatch):
    monkeypatch.setattr(launchers, "own_maps", lambda: MAPS)
    assert "torch is not built for ROCm" in environment.environment(HERE).reason


def test_a_damaged_library_is_wrong(monkeypatch, tmp_path):
    folder = tmp_path / "gfx942"
    shutil.copytree(build.shipped_folder("gfx942"), folder)
    library = folder / build.LIBRARY
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)
    monkeypatch.setattr(build, "shipped_folder", lambda target: folder)
    found = environment.environment(HERE)
    assert found.state == "wrong" and "is damaged" in found.reason


def test_a_tool_that_hangs_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(environment, "COMMAND_S", 0.2)
    assert environment.output_of(("sleep", "60")).startswith("unknown: TimeoutExpired")


def test_known_problems(reported):
    assert environment.known_problems(HERE).reason == "none found"
    warning = {"name": "stale-mha", "severity": "warning", "found": "te 2.10", "why": "", "remedy": ""}
    reported["problems"].append(warning)
    found = environment.known_problems(HERE)
    assert (found.state, found.reason) == ("pass", "warning: stale-mha (te 2.10)")
    reported["problems"].append({**warning, "severity": "error", "name": "psutil", "found": "no psutil"})
    found = environment.known_problems(HERE)
    assert found.state == "wrong" and "error: psutil (no psutil)" in found.reason


def test_a_missing_package_is_wrong(reported):
    reported["packages"][0]["version"] = None
    assert environment.known_problems(HERE).reason == "not installed: torch"


def test_rates_of_this_machine_and_a_slow_copy(monkeypatch):
    found = rates.rates(HERE)
    assert found.state == "pass" and found.figures["cpu"]["copy_tb_per_s"] > 1e-3
    monkeypatch.setattr(probes, "copy_rate", lambda *given: 0.5e9)
    found = rates.rates(HERE)
    assert found.state == "slow" and "copy_tb_per_s 0.0005, expected 0.001" in found.reason


def test_a_product_or_copy_with_wrong_numbers_is_wrong(monkeypatch):
    assert rates.wrong_numbers(torch.device("cpu"), torch.float32) == []
    product, clone = torch.mm, torch.Tensor.clone

    def damaged(left, right, **named):
        out = product(left, right, **named)
        out[7, 9] += 1
        return out

    monkeypatch.setattr(torch, "mm", damaged)
    found = rates.rates(HERE)
    assert found.state == "wrong" and found.reason.startswith("cpu: 1 of 262,144 elements of a product of ones")
    monkeypatch.setattr(torch, "mm", product)
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: clone(tensor).index_fill_(0, torch.tensor([5]), 0))
    assert rates.rates(HERE).reason == "cpu: 1 of 16,777,216 numbers of a copy differ"


@pytest.mark.parametrize(
    ("name", "copy", "state", "kind"),
    [
        ("AMD Instinct MI300X", 4.0e12, "pass", "PREDICTION"),
        ("AMD Instinct MI300X", 2.0e12, "slow", "PREDICTION"),
        ("NVIDIA H200", 4.0e12, "pass", "measured"),
        ("NVIDIA B300", 1.0e12, "pass", "none"),
    ],
)
def test_a_device_is_compared_with_its_recipe(monkeypatch, name, copy, state, kind):
    monkeypatch.setattr(probes, "measure", lambda device, dtype: probes.Rates(700e12, copy))
    monkeypatch.setattr(rates, "wrong_numbers", lambda device, dtype: [])
    found = rates.rates(Setting("cuda", 2, name, Path("unused")))
    assert found.state == state and list(found.figures) == ["cuda:0", "cuda:1"]
    assert found.expected["kind"].startswith(kind)


def test_a_hazard_in_triton_s_cache_is_wrong(monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "shipped_folder", lambda target: tmp_path)
    good = assemble(HEAD + "  v_mov_b32 v8, 0\n" + TAIL, "no_hazard").read_bytes()
    (tmp_path / build.LIBRARY).write_bytes(good)
    found = environment.scan(HERE)
    assert (found.state, found.reason) == ("pass", "1 files, 0 of them from Triton's cache")
    bad = assemble(HEAD + "  global_store_dwordx4 v1, v[8:11], s[4:5]\n  v_mov_b32 v8, 0\n" + TAIL, "hazards")
    (tmp_path / "KEY").mkdir()
    (tmp_path / "KEY" / "kernel.hsaco").write_bytes(bad.read_bytes())
    found = environment.scan(HERE)
    assert found.state == "wrong" and "kernel.hsaco" in found.reason and "wait states" in found.reason
    (tmp_path / "KEY" / "kernel.hsaco").write_bytes(good[: len(good) // 2])
    found = environment.scan(HERE)
    assert found.state == "wrong" and list(found.figures["unreadable"]) == [str(tmp_path / "KEY" / "kernel.hsaco")]


def test_without_a_disassembler_the_scan_is_skipped(monkeypatch, tmp_path):
    def missing(path):
        raise hazards.ToolNotFound("no llvm-objdump")

    monkeypatch.setattr(hazards, "scan", missing)
    assert environment.scan(HERE).state == "skipped"


@pytest.mark.parametrize(
    "name, architecture, units, gib, expected",
    [
        ("AMD Radeon Graphics", "gfx942:sramecc+:xnack-", 304, 192, "MI300X"),  # no amdgpu.ids in the container
        ("AMD Instinct MI300X", "gfx942:sramecc+:xnack-", 304, 192, "MI300X"),
        ("AMD Radeon Graphics", "gfx942:sramecc+:xnack-", 304, 256, None),  # an MI325X
        ("AMD Radeon Graphics", "gfx942:sramecc+:xnack-", 38, 24, None),  # a partition
        ("AMD Radeon Graphics", "gfx1100", 304, 192, None),
        ("NVIDIA H200", "", 132, 140, "H200"),
    ],
)
def test_a_device_is_known_without_its_name(name, architecture, units, gib, expected):
    found = machine_of(named(name, architecture, units, gib))
    assert (found and found.name) == expected
