# SPDX-License-Identifier: Apache-2.0
"""Programs outside Python that some tests need."""

import os
import shutil
from typing import NoReturn

import pytest


def require_tool(name: str) -> str:
    """Return the path of a program, as in `clang = require_tool("clang-19")`.

    Where the program is missing the test is skipped; under CI=true it fails instead, for there a skip would hide that
    nothing ran. Name the Debian package in tools/apt-packages.txt.
    """
    path = shutil.which(name)
    if path is None:
        skip_or_fail(f"{name} is not on PATH; tools/apt-packages.txt names the package")
    return path


def skip_or_fail(reason: str) -> NoReturn:
    """Skip the test, or fail it under CI=true."""
    if os.environ.get("CI") == "true":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
