# SPDX-License-Identifier: Apache-2.0
"""A few of tests.faults.random_kills' runs."""

import subprocess
import sys

import pytest

FEW = ("--count", "3", "--seed", "14", "--ranks", "1")  # while it commits, copies and describes


def kills(*arguments: str) -> str:
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults.random_kills", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


@pytest.mark.slow
def test_killed_saves_lose_nothing_durable():
    output = kills(*FEW)
    assert "3 of 3 resumed from the newest durable checkpoint to equal bits" in output
    assert all(f"seed {seed}, 1 ranks: " in output for seed in range(14, 17))


@pytest.mark.slow
def test_killed_saves_of_two_ranks_lose_nothing_durable():
    assert "6 of 6 resumed" in kills("--count", "6", "--seed", "301", "--ranks", "2")
