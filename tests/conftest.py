# SPDX-License-Identifier: Apache-2.0
"""Fixtures that every test may use."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Runs of whole processes take minutes a file: begun first, they do not hold up the end, when the other test process has
# nothing left. A test of `plan` compiles an extension of Megatron, for which tests of `model` would wait on both.
LONG = (
    "demo",
    "distributed",
    "faults",
    "gfx942",
    "patches",
    "training",
    "plan",
    "parallel",
    "verify",
    "run",
    "hosts",
    "bench",
)


# The check of every start (zaya_plugin.run.megatron_check) takes seconds for each recipe, and most tests start another
# one, whose ranks validate the same. tests/run/test_megatron_check.py and tests/hosts/test_argument_check.py make it.
os.environ["ZAYA_CHECK"] = "off"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    rank = {folder: number for number, folder in enumerate(LONG)}
    items.sort(key=lambda item: rank.get(item.path.relative_to(here).parts[0], len(rank)))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same random numbers in every run and in every order of the tests; importing torch is left to those that need it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(1234)


@pytest.fixture(scope="session")
def require_tool() -> Callable[[str], str]:
    """Gives the path of a program outside Python, as in `clang = require_tool("clang-19")`.

    Where the program is missing the test is skipped; under CI=true it fails instead, for there a skip would hide that nothing ran.
    Name the Debian package in tools/apt-packages.txt.
    """

    def find(name: str) -> str:
        path = shutil.which(name)
        if path is not None:
            return path
        reason = f"{name} is not on PATH; tools/apt-packages.txt names the package"
        if os.environ.get("CI") == "true":
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)

    return find


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A prepared data set of real text: some 600 kB of the standard library, a BPE of 512 entries."""
    from tests.running import zaya

    output = tmp_path_factory.mktemp("corpus") / "stdlib"
    done = zaya(
        "data",
        "prepare",
        "--output",
        str(output),
        "--max-bytes",
        "600K",
        "--valid-fraction",
        "0.2",
        "--train-bpe",
        "512",
        "--workers",
        "1",
    )
    assert done.returncode == 0, done.stdout
    return output
