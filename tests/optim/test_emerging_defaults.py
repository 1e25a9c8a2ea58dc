# SPDX-License-Identifier: Apache-2.0
"""Test that docs/another-part.md's table of Emerging-Optimizers' defaults holds for our recipe and the installed package."""

import inspect
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

ROOT = Path(__file__).parents[2]


def rows() -> list[list[str]]:
    text = (ROOT / "docs" / "another-part.md").read_text().split("<!-- emerging-optimizers -->")[1]
    lines = text.split("<!-- /emerging-optimizers -->")[0].strip().splitlines()[2:]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines]


def test_our_column_is_the_recipe():
    recipe = yaml.safe_load((ROOT / "recipes" / "optim" / "muon.yaml").read_text())
    assert {key: yaml.safe_load(ours) for key, ours, *_ in rows()} == {key: recipe[key] for key, *_ in rows()}
    assert len(rows()) == 6


def test_their_column_is_the_signature():
    muon = pytest.importorskip("emerging_optimizers.orthogonalized_optimizers").Muon
    parameters = inspect.signature(muon).parameters
    column = 3 if Version(metadata.version("emerging-optimizers")) < Version("0.5.0") else 4
    for row in rows():
        default = parameters[row[2]].default
        stated = yaml.safe_load(row[column].removeprefix("about "))
        near = pytest.approx(stated, abs=0.05) if row[column].startswith("about") else stated
        assert default == near, f"{row[2]}: the table says {row[column]}, the package {default}"
