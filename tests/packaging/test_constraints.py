# SPDX-License-Identifier: Apache-2.0
"""constraints.txt pins all that zaya_plugin[cpu,dev] pulls in, at the versions that are installed, and nothing else."""

import importlib.util
import re
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
    different = {name: (version, pins.get(name)) for name, version in installed.items() if pins.get(name) != version}
    assert different == {}, "name: (installed, pinned)"


def test_nothing_else_is_pinned(pins):
    installed, _ = closure()
    assert {name for name in pins if name not in installed and not name.startswith(BUILD_DEPENDENT)} == set()


def test_the_versions_that_the_project_names(pins):
    assert (pins["torch"], pins["megatron-core"], pins["transformers"]) == ("2.13.0", "0.19.2", "5.23.0")
