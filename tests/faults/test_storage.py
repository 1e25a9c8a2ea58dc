# SPDX-License-Identifier: Apache-2.0
"""Storage that fails at the start of a run: one message with the path and the free space, exit code 2, no traceback."""

import os
import subprocess

import pytest

from tests.running import train


@pytest.fixture
def disk(tmp_path, request):
    """A small file system with the options of the test's parameter."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", request.param, "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small file system needs root")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def fill(directory):
    with open(directory / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


@pytest.mark.parametrize(
    ("disk", "filled", "reason"),
    [
        pytest.param("size=64k", True, "No space left on device", id="full"),
        pytest.param("size=1m,nr_inodes=2", False, "No space left on device", id="no inodes", marks=pytest.mark.slow),
        pytest.param("size=1m,nr_inodes=4", False, "No space left on device", id="few inodes", marks=pytest.mark.slow),
        pytest.param("size=1m,ro", False, "Read-only file system", id="read only", marks=pytest.mark.slow),
    ],
    indirect=["disk"],
)
def test_a_start_on_storage_that_fails(corpus, disk, filled, reason):
    if filled:
        fill(disk)
    run = train(disk / "run", corpus, "nproc=1", check=False)
    assert run.code == 2 and "Traceback" not in run.output, run.output
    assert f"zaya: {disk}/run" in run.output or f"run_dir={disk}/run" in run.output
    assert reason in run.output
    left = [path for path in disk.rglob("*") if path.name.startswith("run.lock")]
    assert not left, "a failed start leaves no lock"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a file that root cannot write either")
@pytest.mark.slow
def test_a_file_of_the_run_that_cannot_be_replaced(corpus, tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)
    (run_dir / "logs" / "torchrun.log").mkdir()
    run = train(run_dir, corpus, "nproc=1", check=False)
    assert "Traceback" not in run.output and f"{run_dir}/logs/torchrun.log: Is a directory" in run.output, run.output
