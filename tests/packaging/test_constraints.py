# SPDX-License-Identifier: Apache-2.0
"""constraints.txt pins all that zaya_plugin[cpu,dev,docs] pulls in, at the versions that are installed, and nothing else."""

import importlib.util
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
# Come with the CUDA build of torch alone; an environment with another build of the same version is as good.
BUILD_DEPENDENT = ("nvidia-", "cuda-")


def closure():
    spec = importlib.util.spec_from_file_location("pins", REPO / "tools" / "pins.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.closure()


@pytest.fixture(scope="module")
def pins() -> dict[str, str]:
    lines = [line for line in (REPO / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    exact = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*==[0-9][0-9a-z.]*")
    assert [line for line in lines if not exact.fullmatch(line)] == []
    return dict(line.split("==") for line in lines)


def test_installed_versions_are_the_pinned_ones(pins):
    installed, missing = closure()
    assert missing == set(), "run `make setup`"
    public = {name: version.partition("+")[0] for name, version in installed.items()}  # torch's CPU wheel: 2.13.0+cpu
    different = {name: (version, pins.get(name)) for name, version in public.items() if pins.get(name) != version}
    assert different == {}, "name: (installed, pinned)"


def test_nothing_else_is_pinned(pins):
    installed, _ = closure()
    assert {name for name in pins if name not in installed and not name.startswith(BUILD_DEPENDENT)} == set()


def test_the_versions_that_the_project_names(pins):
    assert (pins["torch"], pins["megatron-core"], pins["transformers"]) == ("2.13.0", "0.19.2", "5.23.0")


def test_an_index_of_cpu_wheels_takes_the_place_of_the_cuda_build(pins, tmp_path):
    """pip prefers a version with a local label, so PIP_EXTRA_INDEX_URL is all that a user sets."""
    for label in ("", "+cpu"):
        version = pins["torch"] + label
        info = f"torch-{version}.dist-info"
        with zipfile.ZipFile(tmp_path / f"torch-{version}-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--isolated",
        "download",
        "--no-index",
        "--no-deps",
        "--dest",
        tmp_path / "taken",
    ]
    pip += ["--find-links", tmp_path, "--constraint", REPO / "constraints.txt", "torch"]
    assert subprocess.run(pip, capture_output=True).returncode == 0
    assert [file.name for file in (tmp_path / "taken").iterdir()] == [f"torch-{pins['torch']}+cpu-py3-none-any.whl"]
