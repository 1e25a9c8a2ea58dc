# SPDX-License-Identifier: Apache-2.0
"""Test the checks `environment` and `hazards`, each with its injected fault."""

import hashlib
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hip_ops.runtime import build, code_objects, hazards, launchers
from tests.gfx942.assembly_kernel import HEAD, TAIL
from tests.gfx942.toolchain import assemble
from tests.tool import require_tool
from zaya_plugin.config.compose import compose
from zaya_plugin.machines import installed, software
from zaya_plugin.machines.checks import Setting

CPU = torch.device("cpu")
CPU_SETTING = Setting("cpu", 0, "CPU x86_64", Path("unused"), chosen="cpu")
MAPS = "7f00-7f01 r-xp 0 00:00 1    /opt/rocm-6.4/lib/libamdhip64.so.6\n"
OTHER = "7f02-7f03 r-xp 0 00:00 2    /venv/torch/lib/libamdhip64.so.7\n"


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    """An environment without devices, patches and mapped libraries of its own."""
    monkeypatch.setattr(installed, "torch_devices", lambda: {"built_for": "ROCm 7.1", "accelerators": []})
    monkeypatch.setattr(installed, "patches", list)
    monkeypatch.setattr(launchers, "own_maps", lambda: "")  # tests before this may have mapped a libamdhip64


def test_the_environment_of_this_machine(monkeypatch):
    monkeypatch.setenv("ZAYA_API_KEY", "abc")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    outcome = software.environment(CPU_SETTING)
    assert outcome.state == "pass" and "library" not in outcome.reason, "none is loaded without a device of AMD"
    assert outcome.figures["variables"]["NCCL_DEBUG"] == "WARN" and "abc" not in str(outcome.figures)
    objects = outcome.figures["code_objects"]
    assert len(objects) > 10 and all(len(entry) == 64 for entry in objects)
    assert build.manifest_of(build.shipped("gfx942")[0])["sha256"] in outcome.figures["library"]
    assert outcome.figures["hip_runtimes"] == []


@pytest.mark.parametrize("hip", ["7.1.2", "6.4.1"])
def test_two_hip_runtimes_are_wrong(monkeypatch, hip):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(launchers, "own_maps", lambda: MAPS + OTHER)
    outcome = software.environment(CPU_SETTING)
    assert outcome.state == "wrong" and "rocm-6.4" in outcome.reason and "/venv/torch/lib" in outcome.reason
    assert len(outcome.figures["hip_runtimes"]) == 2
    monkeypatch.setattr(launchers, "own_maps", lambda: MAPS if hip[0] == "6" else OTHER)
    assert software.environment(CPU_SETTING).state == "pass"


@pytest.mark.parametrize("built_for", ["hip", "cuda", None])
def test_a_torch_for_gpus_that_finds_none_is_wrong(monkeypatch, built_for):
    for name in ("hip", "cuda"):
        monkeypatch.setattr(torch.version, name, "7.1" if name == built_for else None)
    monkeypatch.setattr(launchers, "own_maps", lambda: OTHER if built_for == "hip" else "")
    outcome = software.environment(replace(CPU_SETTING, chosen="auto"))
    assert outcome.state == ("wrong" if built_for else "pass")
    assert ("7.1 and finds no device" in outcome.reason and "--device cpu" in outcome.reason) == (built_for is not None)
    assert software.environment(CPU_SETTING).state == "pass", "--device cpu"


@pytest.mark.parametrize(
    ("name", "devices", "visible", "reason"),
    [
        ("AMD Instinct MI300X", 8, {}, None),
        (
            "AMD Instinct MI300X",
            7,
            {},
            "7 of 8 devices available (MI300X). To examine these alone: CUDA_VISIBLE_DEVICES=0,1,2,",
        ),
        ("AMD Instinct MI300X", 2, {"HIP_VISIBLE_DEVICES": "0,1"}, None),
        ("AMD Instinct MI300X", 1, {"HIP_VISIBLE_DEVICES": "0,1"}, "1 of 2 devices"),
        ("AMD Instinct MI300X", 2, {"ROCR_VISIBLE_DEVICES": "0,1,2,3", "HIP_VISIBLE_DEVICES": "0,1"}, None),
        ("NVIDIA H200", 1, {}, "1 of 8 devices available (H200)"),
        ("NVIDIA B300", 1, {}, None),
    ],
)
def test_a_machine_with_fewer_devices_than_its_recipe_is_wrong(monkeypatch, name, devices, visible, reason):
    for variable in software.VISIBLE:
        monkeypatch.delenv(variable, raising=False)
    for variable, value in visible.items():
        monkeypatch.setenv(variable, value)
    outcome = software.environment(Setting("cuda", devices, name, Path("unused")))
    assert outcome.state == ("wrong" if reason else "pass")
    assert reason is None or outcome.reason.startswith(reason), outcome.reason


def test_a_launcher_with_another_torch_is_wrong(monkeypatch):
    monkeypatch.setattr(launchers, "own_maps", lambda: MAPS)
    assert "torch is not built for ROCm" in software.environment(CPU_SETTING).reason


def test_a_damaged_library_is_wrong(monkeypatch, tmp_path):
    folder = tmp_path / "gfx942"
    shutil.copytree(build.shipped_folder("gfx942"), folder)
    library = folder / build.LIBRARY
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 1
    library.write_bytes(content)
    monkeypatch.setattr(build, "shipped_folder", lambda target: folder)
    outcome = software.environment(CPU_SETTING)
    assert outcome.state == "wrong" and "is damaged" in outcome.reason


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
@pytest.mark.parametrize("shipped", [True, False])
def test_the_library_of_the_device_is_named(monkeypatch, tmp_path, target, shipped):
    """A device of each architecture, with the library that its kernels come from, and one whose build fails."""

    def load(target):
        launchers._paths[target] = (build.SHIPPED / target if shipped else tmp_path / f"{target}-0123") / build.LIBRARY

    on_device = Setting("cuda", 1, "AMD Instinct", Path("unused"))
    monkeypatch.setattr(torch.version, "hip", "7.1.2")
    monkeypatch.setattr(launchers, "own_maps", lambda: OTHER)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(launchers, "architecture", lambda device: target)
    monkeypatch.setattr(code_objects, "architecture", lambda device: target)
    monkeypatch.setattr(code_objects, "_refused", {})
    monkeypatch.setattr(code_objects.CodeObjects, "load", lambda objects, device: loads.append(target))
    loads = []
    monkeypatch.setattr(launchers, "_paths", {})
    monkeypatch.setattr(launchers, "_failures", {})
    monkeypatch.setattr(launchers, "_library", load)
    monkeypatch.setattr(launchers, "manifest_of", lambda library: {"sha256": "abc"})
    outcome = software.environment(on_device)
    content = (build.shipped_folder(target) / build.LIBRARY).read_bytes()
    hashes = [hashlib.sha256(part).hexdigest() for part in hazards.code_objects(content)]
    assert hashes and outcome.figures["code_objects"] == hashes, "those of the device's library"
    assert hazards.architecture_of(next(hazards.code_objects(content))) == target
    library = f"library {target} " + ("as shipped" if shipped else f"built from source, {target}-0123")
    assert outcome.state == "pass" and outcome.reason.endswith(f"{library}, objects as shipped")
    assert loads == [target]

    def refuses(objects, device):
        raise RuntimeError("one.hsaco failed with code 209: hipErrorNoBinaryForGpu")

    monkeypatch.setattr(code_objects.CodeObjects, "load", refuses)
    outcome = software.environment(on_device)
    assert (
        outcome.state == "wrong"
        and "the shipped objects cannot be loaded: one.hsaco failed with code 209" in outcome.reason
    )

    def fails(target):
        raise build.BuildError("hipcc failed")

    monkeypatch.setattr(launchers, "_library", fails)
    monkeypatch.setattr(code_objects, "_refused", {})
    assert software.environment(on_device).reason.endswith("library unknown: BuildError: hipcc failed")


def test_a_tool_that_hangs_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(software, "COMMAND_S", 0.2)
    assert software.output_of(("sleep", "60")).startswith("unknown: TimeoutExpired")


@pytest.fixture
def scanned(monkeypatch, tmp_path):
    """A shipped library and Triton's folders without a hazard: the folder of torch.compile's first device."""
    require_tool("llvm-objdump-19")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(build, "shipped_folder", lambda target: tmp_path)
    (tmp_path / build.LIBRARY).write_bytes(good())
    folder = tmp_path / "triton" / "0"
    (folder / "KEY").mkdir(parents=True)
    return folder


def good() -> bytes:
    return assemble(HEAD + "  v_mov_b32 v8, 0\n" + TAIL, "no_hazard").read_bytes()


def bad() -> bytes:
    wide_store = "  global_store_dwordx4 v1, v[8:11], s[4:5]\n  v_mov_b32 v8, 0\n"
    return assemble(HEAD + wide_store + TAIL, "hazards").read_bytes()


@pytest.mark.parametrize(
    ("kernel", "override"),
    [
        ("triton_poi_fused_silu_backward_0", {"cluster.environment.TORCHDYNAMO_DISABLE": "1"}),
        ("grouped_outer_kernel", {"cluster.kernel_overrides.grouped_product": "grouped_mm"}),
        ("router_mlp_backward_kernel", {"cluster.kernel_overrides.router_mlp": "compiled"}),
        ("symmetric_product_kernel", {"cluster.kernel_overrides.newton_schulz": "reference"}),
        ("kernel_of_another_package", {}),
        ("expert_input_kernel", {}),  # of a decoding step
    ],
)
def test_a_hazard_in_triton_s_caches_is_wrong_and_names_the_override(scanned, kernel, override):
    path = scanned / "KEY" / f"{kernel}.hsaco"
    path.write_bytes(bad())
    outcome = software.hazards(CPU_SETTING)
    assert outcome.state == "wrong" and f"{kernel}.hsaco" in outcome.reason and "wait states" in outcome.reason
    assert outcome.overrides == override
    assert all(f"; without it: {name}={value}" in outcome.reason for name, value in override.items())
    compose(["cluster=mi300x_8", "data.path=none", *(f"{name}={value}" for name, value in override.items())])
    path.write_bytes(good())
    assert software.hazards(CPU_SETTING).state == "pass"
    path.write_bytes(good()[:400])
    outcome = software.hazards(CPU_SETTING)
    assert outcome.state == "wrong" and list(outcome.figures["unreadable"]) == [str(path)] and not outcome.overrides


def test_a_hazard_in_a_shipped_object_is_wrong_and_names_the_override(scanned, tmp_path):
    path = tmp_path / "grouped_pointer_outer_kernel-097dd930.hsaco"
    path.write_bytes(good())
    assert software.hazards(CPU_SETTING).reason.startswith("2 shipped and 0 files of Triton's caches")
    path.write_bytes(bad())
    outcome = software.hazards(CPU_SETTING)
    assert outcome.state == "wrong" and list(outcome.figures["violations"]) == [str(path)]
    assert outcome.overrides == {"cluster.kernel_overrides.grouped_product": "grouped_mm"}


def test_the_scan_says_how_many_kernels_of_torch_compile_it_read(monkeypatch, scanned):
    nothing = "1 shipped and 0 files of Triton's caches, 0 of them by torch.compile: its kernels were not examined"
    outcome = software.hazards(CPU_SETTING)
    assert (outcome.state, outcome.reason) == ("pass", f"{nothing}; folders: {scanned}")
    (scanned / "KEY" / "grouped_rows_kernel.hsaco").write_bytes(good())
    assert (
        "1 shipped and 1 files of Triton's caches, 0 of them by torch.compile" in software.hazards(CPU_SETTING).reason
    )
    # On ROCm a formula is compiled first, so that there is a kernel.
    on_device = Setting("cuda", 8, "AMD Instinct MI300X", Path("unused"))
    monkeypatch.setattr(torch.version, "hip", "7.2")
    rank = scanned.with_name("7") / "KEY" / "triton_poi_fused_add_0.hsaco"

    def compile_formula(device):
        assert device == torch.device("cuda", 0)
        rank.parent.mkdir(parents=True)
        rank.write_bytes(bad())

    monkeypatch.setattr(software, "compile_formula", compile_formula)
    outcome = software.hazards(on_device)
    assert outcome.state == "wrong" and outcome.figures["of_torch_compile"] == 1 and str(rank) in outcome.reason
    rank.write_bytes(good())
    monkeypatch.setattr(software, "compile_formula", lambda device: None)
    assert software.hazards(on_device).state == "pass"
    rank.unlink()
    outcome = software.hazards(on_device)
    assert outcome.state == "skipped" and "0 of them by torch.compile: its kernels were not" in outcome.reason

    def fails(device):
        raise RuntimeError("cannot find ld.lld")

    monkeypatch.setattr(software, "compile_formula", fails)
    outcome = software.hazards(on_device)
    assert outcome.state == "skipped"
    assert "not examined (RuntimeError: cannot find ld.lld); folders" in outcome.reason


def test_the_formula_reaches_inductor(monkeypatch):
    graphs = []

    def compile_fx(module, inputs, **options):
        graphs.append(module)
        return module.forward

    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    software.compile_formula(CPU)
    assert len(graphs) == 1
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    with pytest.raises(ValueError, match="TORCHDYNAMO_DISABLE=1 disables torch.compile"):
        software.compile_formula(CPU)


@pytest.mark.slow  # a C++ compiler runs 14 s
def test_inductor_writes_kernels_of_the_formula(monkeypatch, tmp_path):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    software.compile_formula(CPU)
    kernels = [path for path in tmp_path.rglob("*.main.cpp") if "void  kernel" in path.read_text()]
    assert len(kernels) >= 2, "forward and backward"


def test_without_a_disassembler_the_scan_is_skipped(monkeypatch, tmp_path):
    def missing(path):
        raise hazards.ToolNotFound("no llvm-objdump")

    monkeypatch.setattr(hazards, "scan", missing)
    assert software.hazards(CPU_SETTING).state == "skipped"
