# SPDX-License-Identifier: Apache-2.0
"""`zaya doctor`: the report names what is there, what is not and how to get it."""

import json
from importlib import metadata

from zaya_plugin import doctor


def report(**changes):
    packages = [dict(name=name, version="1.0", use=use, get=get) for name, _, use, get in doctor.PACKAGES]
    python = dict(version="3.12.1", executable="/usr/bin/python", platform="Linux")
    devices = dict(built_for="ROCm 6.4", cpu_cores=8, accelerators=[dict(index=0, name="MI300X", memory_gib=192, arch="gfx942")])
    patches = [dict(name="a.b", reason="because", applies=False, scope="cpu", versions=">=2.6")]
    kernels = [dict(device="cuda", backend="hip", reason="auto")]
    report = dict(zaya_plugin="0.1.0", python=python, packages=packages, devices=devices, kernels=kernels, patches=patches)
    return report | changes


def test_this_environment_is_described_in_json(capsys):
    code = doctor.main(["--json"])
    found = json.loads(capsys.readouterr().out)
    versions = {item["name"]: item["version"] for item in found["packages"]}
    assert versions["torch"] == metadata.version("torch")
    assert set(versions) >= {"torch", "megatron-core", "transformers", "triton", "transformer-engine", "aiter"}
    assert code == int(any(item["version"] is None and item["use"].startswith("needed") for item in found["packages"]))
    assert found["devices"]["cpu_cores"] >= 1
    assert {"device": "cpu", "backend": "torch", "reason": "auto"} in found["kernels"]
    assert all(set(patch) == {"name", "reason", "applies", "scope", "versions"} for patch in found["patches"])
    assert {patch["scope"] for patch in found["patches"]} <= {"cpu", "always"}


def test_people_read_devices_and_patches():
    text = doctor.render(report())
    assert "0: MI300X, 192 GiB, gfx942" in text and "torch is built for ROCm 6.4; 8 CPU cores" in text
    assert "  cuda  hip     auto" in text
    assert "not here  a.b  (cpu, >=2.6)\n            because" in text


def test_what_is_missing_comes_with_the_way_to_get_it():
    packages = [dict(name="aiter", version=None, use="optional", get="github.com/ROCm/aiter")]
    text = doctor.render(report(packages=packages, devices="unknown: torch is not installed", patches="unknown: no torch"))
    assert "aiter               not found" in text and "github.com/ROCm/aiter" in text
    assert "Devices\n  unknown: torch is not installed" in text and "Patches\n  unknown: no torch" in text


def test_a_package_that_does_not_exist_has_no_version():
    assert doctor._version("no-such-distribution", "no_such_module.inside") is None
    assert doctor._version("hydra-core", "hydra") == metadata.version("hydra-core")


def test_a_torch_that_does_not_import_is_reported():
    def broken():
        raise OSError("libamdhip64.so.6: cannot open shared object file")

    assert doctor._ask(broken) == "unknown: OSError: libamdhip64.so.6: cannot open shared object file"
