# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the packaging tests: the files that git would commit, and a copy of them to build from."""

import shutil
import subprocess
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def project_files() -> list[Path]:
    """Paths relative to the repository of all files that are tracked or would be, sorted."""
    command = ["git", "-C", str(REPO), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True)
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so there is no list of the project's files")
    files = [Path(name) for name in sorted(set(listed.stdout.split("\0")) - {""})]
    return [file for file in files if (REPO / file).is_file()]


@pytest.fixture(scope="session")
def source_copy(project_files, tmp_path_factory) -> Path:
    """A copy without build products: setuptools would put the files of an old build/ into a new wheel."""
    copy = tmp_path_factory.mktemp("source")
    for file in project_files:
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(REPO / file, copy / file)
    return copy
