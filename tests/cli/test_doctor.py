# SPDX-License-Identifier: Apache-2.0
"""`zaya doctor`: the report names installed packages, missing ones and how to install them."""

import json
from importlib import metadata

from hip_ops import set_kernels, use_kernels
from hip_ops.runtime.build import library_note
from zaya_plugin import doctor


def report(**changes):
    packages = [dict(name=name, version="1.0", use=use, get=get) for name, _, use, get in doctor.PACKAGES]
    python = dict(version="3.12.1", executable="/usr/bin/python", platform="Linux")
    devices = dict(
        built_for="ROCm 6.4", cpu_cores=8, accelerators=[dict(index=0, name="MI300X", memory_gib=192, arch="gfx942")]
    )
    change = dict(until="callbacks exist", upstream="https://there", package="megatron-core", fits=True)
    patches = [dict(change, symbol="a.b", reason="because", applies=False, scope="cpu", versions=">=2.6")]
    kernels = [dict(device="cuda", versions=["rms_norm    hip (kernels=auto)", "router_mlp  triton (kernels=auto)"])]
    hosts = [dict(name="zaya train", possible=True, detail="megatron.core 0.19.2")]
    hooks = [dict(change, symbol="a.c", reason="carries state", versions="")]
    parts = dict(
        packages=packages, hosts=hosts, problems=[], devices=devices, kernels=kernels, patches=patches, hooks=hooks
    )
    report = dict(zaya_plugin="0.1.0", python=python, **parts)
    return report | changes


def test_this_environment_is_described_in_json(capsys):
    set_kernels(None)  # a recipe of another test in this process may have set it
    code = doctor.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    versions = {item["name"]: item["version"] for item in found["packages"]}
    assert versions["torch"] == metadata.version("torch")
    assert set(versions) >= {"torch", "megatron-core", "transformers", "triton", "transformer-engine", "aiter"}
    assert code == doctor.exit_status(found) == 0, "these tests run where training can"
    assert [host["possible"] for host in found["hosts"]][:2] == [True, True]
    assert all(set(problem) == {"name", "severity", "found", "why", "remedy"} for problem in found["problems"])
    assert found["devices"]["cpu_cores"] >= 1
    assert {"device": "cpu", "versions": ["all operators  reference (kernels=auto)"]} in found["kernels"]
    library = f"library of hip: {library_note('gfx942')}"
    assert {"device": "gfx942", "versions": [library]} in found["kernels"]
    change = {"symbol", "reason", "until", "upstream", "package", "versions", "fits"}
    assert all(set(patch) == change | {"applies", "scope"} for patch in found["patches"])
    assert all(set(hook) == change for hook in found["hooks"])
    assert {patch["scope"] for patch in found["patches"]} <= {"cpu", "always"}


def test_people_read_devices_and_patches():
    text = doctor.render(report())
    assert "0: MI300X, 192 GiB, gfx942" in text and "torch is built for ROCm 6.4; 8 CPU cores" in text
    assert "  cuda  rms_norm    hip (kernels=auto)\n  cuda  router_mlp  triton (kernels=auto)\n" in text
    assert "not here  a.b  (cpu, megatron-core >=2.6)\n            because; until callbacks exist\n" in text
    assert (
        "  a.c  (megatron-core any)\n            carries state; until callbacks exist\n            https://there"
        in text
    )


def test_the_verdict_comes_first_and_the_rest_with_all():
    short = doctor.render(report(), everything=False)
    assert short.startswith("training can start: no known problem\nzaya_plugin 0.1.0\n")
    assert "0: MI300X" in short and "a.b" not in short and "rms_norm" not in short and "aiter" not in short
    assert len(short.splitlines()) <= 25
    broken = doctor.render(report(problems=[ERROR]), everything=False)
    assert broken.startswith("training cannot start: 1 known problem, below\n") and "psutil: no psutil" in broken
    without_torch = doctor.render(report(devices="unknown: no torch", patches="unknown: no torch"), everything=False)
    assert without_torch.startswith("training cannot start") and "unknown: no torch" in without_torch


def test_kernels_that_are_not_available():
    with use_kernels("compiled"):
        (found,) = [item["versions"] for item in doctor._kernels() if item["device"] == "cpu"]
    assert len(found) == 1 and "is not available on cpu: torch.compile is not used on a CPU" in found[0]


def test_what_is_missing_comes_with_the_way_to_get_it():
    packages = [dict(name="aiter", version=None, use="optional", get="github.com/ROCm/aiter")]
    text = doctor.render(
        report(packages=packages, devices="unknown: torch is not installed", patches="unknown: no torch")
    )
    assert "aiter               not found" in text and "github.com/ROCm/aiter" in text
    assert "Devices\n  unknown: torch is not installed" in text and "process\n  unknown: no torch" in text


def test_a_package_that_does_not_exist_has_no_version():
    assert doctor._version("no-such-distribution", "no_such_module.inside") is None
    assert doctor._version("hydra-core", "hydra") == metadata.version("hydra-core")


def test_a_torch_that_does_not_import_is_reported():
    def broken():
        raise OSError("libamdhip64.so.6: cannot open shared object file")

    assert doctor._ask(broken) == "unknown: OSError: libamdhip64.so.6: cannot open shared object file"


WARNING = dict(name="dynamo-off", severity="warning", found="TORCHDYNAMO_DISABLE=1", why="slow", remedy="unset it")
ERROR = WARNING | dict(
    name="psutil", severity="error", found="no psutil", why="saves need it", remedy="pip install psutil"
)


def test_the_exit_status_says_whether_training_can_start():
    assert doctor.exit_status(report()) == 0
    assert (
        doctor.exit_status(report(problems=[WARNING])) == 0
        and doctor.exit_status(report(problems=[WARNING]), strict=True) == 1
    )
    assert doctor.exit_status(report(problems=[ERROR])) == 1
    assert doctor.exit_status(report(devices="unknown: OSError: libamdhip64.so.6")) == 1
    missing = [dict(name="torch", version=None, use="needed", get="install it")]
    assert doctor.exit_status(report(packages=missing)) == 1


def test_problems_come_with_why_and_what_to_do():
    text = doctor.render(report(problems=[ERROR]))
    assert "error   psutil: no psutil\n          why   saves need it\n          do    pip install psutil" in text
    assert "Known problems\n  none found\n" in doctor.render(report())
    assert "can be    zaya train" in text


def test_a_patch_that_does_not_fit_is_a_problem():
    patches = [dict(symbol="a.b", applies=True, fits=False)]
    found = {problem["name"]: problem for problem in doctor._problems(report(patches=patches))}
    assert found["patch-range"]["severity"] == "error" and found["patch-range"]["found"] == "a.b"
