# SPDX-License-Identifier: Apache-2.0
"""Installing the plain package into an environment that already has torch, megatron-core and the rest changes none of
them.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# A ROCm training image as its package metadata shows it: builds that no index holds, and a core older than the extra
# `cpu` asks for.
ROCM_IMAGE = {
    "torch": "2.8.0+rocm6.4.2",
    "megatron-core": "0.16.0rc0",
    "transformer-engine": "2.2.0.dev0+rocm",
    "aiter": "0.1.5",
    "numpy": "1.26.4",
    "hydra-core": "1.3.2",
    "omegaconf": "2.3.0",
    "tqdm": "4.66.0",
    "antlr4-python3-runtime": "4.9.3",
    "PyYAML": "6.0.1",
    "packaging": "23.2",
}


def would_install(source: Path, pythonpath: str = "") -> dict[str, str]:
    """Name -> version of all that `pip install source` would put into this environment, with no index to take anything
    from.
    """
    report = ("--dry-run", "--quiet", "--report", "-", "--no-index", "--no-build-isolation")
    command = [
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "--disable-pip-version-check",
        "install",
        *report,
        str(source),
    ]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        command, env=env | ({"PYTHONPATH": pythonpath} if pythonpath else {}), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {item["metadata"]["name"]: item["metadata"]["version"] for item in json.loads(done.stdout)["install"]}


def as_installed(site: Path, packages: dict[str, str]) -> str:
    for name, version in packages.items():
        info = site / f"{name.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "INSTALLER").write_text("pip\n")
        (info / "RECORD").write_text("")
    return str(site)


def test_this_environment_stays(source_copy):
    assert set(would_install(source_copy)) == {"zaya_plugin"}


def test_rocm_image_stays(source_copy, tmp_path):
    site = as_installed(tmp_path / "site", ROCM_IMAGE)
    assert set(would_install(source_copy, pythonpath=site)) == {"zaya_plugin"}


def test_the_check_sees_a_missing_requirement(source_copy, tmp_path):
    """An environment whose omegaconf is too old: pip must want another, and with no index it fails, naming it."""
    site = as_installed(tmp_path / "site", ROCM_IMAGE | {"omegaconf": "1.4.1"})
    with pytest.raises(AssertionError, match="omegaconf"):
        would_install(source_copy, pythonpath=site)


def test_extras_are_what_the_set_up_installed(source_copy):
    """Fails in an environment made by other means; `make setup` brings it up to date."""
    assert set(would_install(Path(f"{source_copy}[cpu,dev,docs]"))) == {"zaya_plugin"}
