# SPDX-License-Identifier: Apache-2.0
"""The tables under "Versions" of docs/environment.md agree with what the project pins, requires, and names elsewhere."""

import re
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.version import Version

from zaya_plugin import compat

REPO = Path(__file__).parents[2]
SECTION = (REPO / "docs" / "environment.md").read_text().partition("\n## Versions\n")[2].partition("\n## ")[0]
PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
IMAGE = re.compile(r"\brocm/(?:primus|pytorch):[\w.]*\w")
NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)+")


def table(first_cell: str) -> dict[str, dict[str, str]]:
    """Return the rows of a table of the section: first cell -> column -> cell."""
    lines = SECTION[SECTION.index(f"| {first_cell} |") :].partition("\n\n")[0].splitlines()
    columns, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {row[0].strip("`"): dict(zip(columns, row, strict=True)) for row in rows}


IMAGES, PACKAGES = table("image"), table("package")


def floors(package: str) -> list[str]:
    return NUMBER.findall(PACKAGES[package]["at least"])


def requirement(name: str) -> str:
    extras = PROJECT["optional-dependencies"]
    (line,) = [line for line in extras["cpu"] + extras["megatron"] if Requirement(line).name == name]
    return str(Requirement(line).specifier)


def test_every_image_that_is_named_has_a_row():
    files = [REPO / "README.md", REPO / "docker" / "Dockerfile", *sorted((REPO / "docs").glob("*.md"))]
    named = {tag for file in files if file.name != "log.md" for tag in IMAGE.findall(file.read_text())}
    assert len(named) > 4 and named - set(IMAGES) == set()


@pytest.mark.parametrize("image", IMAGES)
def test_an_image_has_what_the_installation_needs(image):
    (pythons,) = re.findall(r"^PYTHONS = \((.*?)\)", (REPO / "docker" / "install.py").read_text(), re.MULTILINE)
    (supported,) = re.findall(r'^SUPPORTED="(.*)"$', (REPO / "tools" / "find_python.sh").read_text(), re.MULTILINE)
    assert NUMBER.findall(pythons) == supported.split()
    row = IMAGES[image]
    assert ".".join(row["Python"].split(".")[:2]) in supported.split()
    for package, floor in (("Triton", floors("Triton")[0]), ("torch", floors("torch")[-1])):
        assert Version(row[package]) >= Version(floor), package
    for part, cell in re.findall(r"(rocm|py|release_)([0-9][0-9.]*)", image):
        column = {"rocm": "ROCm", "py": "Python", "release_": "torch"}[part]
        assert row[column].startswith(cell), f"the tag names {part}{cell}"


def test_versions_of_the_tests_are_the_pinned_ones():
    pins = dict(re.findall(r"^([a-z0-9-]+)==(\S+)$", (REPO / "constraints.txt").read_text(), re.MULTILINE))
    tests = {name.lower(): row["tests"] for name, row in PACKAGES.items() if name != "Python"}
    assert tests == {name: pins[name] for name in ("torch", "triton", "megatron-core", "transformers")}


def test_least_versions_are_those_that_the_project_requires():
    assert floors("megatron-core") == [compat.OLDEST.removesuffix("rc0"), compat.FIRST_UNSUPPORTED, "0.19"]
    assert requirement("megatron-core").endswith(">=" + PACKAGES["megatron-core"]["tests"])
    assert requirement("torch") == ">=" + floors("torch")[0]
    assert requirement("transformers") == ">=" + floors("transformers")[0]
    assert PROJECT["requires-python"] == ">=" + floors("Python")[0]
