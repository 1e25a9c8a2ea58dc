# SPDX-License-Identifier: Apache-2.0
"""benchmarks/reshape.py states the disk that it needs, and writes nothing where that is not free."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "reshape.py"


@pytest.mark.slow
def test_a_disk_without_room_is_refused_with_the_layers_that_fit(tmp_path):
    folder = tmp_path / "new" / "folder"
    command = [sys.executable, "-W", "ignore", str(SCRIPT), "--folder", str(folder), "--layers"]
    done = subprocess.run([*command, "900000"], capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"GB are free in {tmp_path}" in done.stderr and "--layers=900000: needs " in done.stderr
    assert not folder.exists() and not (tmp_path / "new").exists()
