# SPDX-License-Identifier: Apache-2.0
"""A test without its tool is skipped on a developer's machine and fails under CI=true; with the tool it runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
BODY = """
def test_with_tool(require_tool):
    assert require_tool("{tool}").endswith("{tool}")
"""


def outcome(tmp_path: Path, tool: str, ci: str) -> str:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "test_inner.py").write_text(BODY.format(tool=tool))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rs",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        str(tmp_path),
    ]
    env = os.environ | {"CI": ci, "PYTHONPATH": str(CONFTEST.parents[1])}
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # the plugins triple the start-up time
    return subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True).stdout


@pytest.mark.parametrize(
    ("tool", "ci", "expected"),
    [
        ("no-such-tool-19", "", "1 skipped"),
        ("no-such-tool-19", "false", "1 skipped"),
        ("no-such-tool-19", "true", "1 failed"),
        ("sh", "true", "1 passed"),
    ],
)
def test_missing_tool(tmp_path, tool, ci, expected):
    printed = outcome(tmp_path, tool, ci)
    assert expected in printed
    if tool != "sh":
        assert f"{tool} is not on PATH" in printed
