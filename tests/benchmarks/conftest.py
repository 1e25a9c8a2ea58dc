# SPDX-License-Identifier: Apache-2.0
"""Imports the scripts of benchmarks/, which import each other by name, as modules."""

import importlib
from pathlib import Path

import pytest

from tests.megatron_rank import seed, single_rank  # noqa: F401  (fixtures of every test of this folder)

SCRIPTS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """Imports a script, as in `script("cca_block")`."""
    for folder in (SCRIPTS / "research", SCRIPTS):
        monkeypatch.syspath_prepend(str(folder))
    return importlib.import_module
