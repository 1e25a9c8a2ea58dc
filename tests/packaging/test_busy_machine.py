# SPDX-License-Identifier: Apache-2.0
"""The tests that wait for other processes, on a machine that is busy and set up otherwise than the authors'."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# What failed on such a machine once, and what starts processes and waits for them.
FRAGILE = (
    "aegis/test_agent.py",
    "aegis/test_attempt_phases.py",
    "machines/test_nodes.py",
    "checkpoint/test_saver.py",
    "checkpoint/test_writer.py",
    "cli/test_interrupt.py",
    "corpus/test_resume.py",
    "faults/test_processes.py",
    "hosts/test_loader_processes.py",
    "hosts/test_start_waits.py",
    "run/test_launch.py",
    "run/test_megatron_check.py",
    "training/test_metrics.py",
    "machines/test_check_process.py",
)
BUSY = "while True: pass"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_the_fragile_files_pass_on_a_busy_machine_as_a_background_job(tmp_path):
    """With four endless loops at a higher priority, with SIGINT and SIGHUP ignored, in a directory that holds what
    the demo leaves behind.
    """
    for name in ("data/stdlib", "runs/demo"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "manifest.json").write_text('{"vocabulary": 7}')
    loops = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(4)]

    def as_background_job() -> None:
        os.nice(1)  # with 5 it gets a seventh of a core during the loops
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)

    command = [sys.executable, "-m", "pytest", "-m", "not slow and not gpu", "--rootdir", ROOT]
    command += ["-c", ROOT / "pyproject.toml", "--timeout", "1200", *(ROOT / "tests" / name for name in FRAGILE)]
    try:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            preexec_fn=as_background_job,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    finally:
        for loop in loops:
            loop.kill()
    assert done.returncode == 0, done.stdout[-8000:]
