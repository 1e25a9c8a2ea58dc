# SPDX-License-Identifier: Apache-2.0
"""Spawned processes end with their rank; that Megatron's do is asserted at every kill of
tests/faults/test_curriculum.py.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="prctl(2) is Linux's")

CHILD = (
    "import time; from zaya_plugin.ground.parent_death import follow_rank; follow_rank(); print('up', flush=True); "
    "time.sleep(60)"
)
RANK = f"""
import subprocess, sys, time
from zaya_plugin.ground.parent_death import adopt_children
adopt_children()
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), child.pid, flush=True)
time.sleep(60)
"""


# What Megatron's checkpoint writer starts: a manager, whose process imports the rank's main module first.
WITH_MANAGER = """
import multiprocessing, time
from zaya_plugin.ground.parent_death import adopt_children, follow_rank
if __name__ == "__mp_main__" and {follows}:
    follow_rank()
if __name__ == "__main__":
    adopt_children()
    manager = multiprocessing.get_context("spawn").Manager()
    queue = manager.Queue()
    queue.put("up")
    print(queue.get(), manager._process.pid, flush=True)
    time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ended(pid: int, patience: float) -> bool:
    deadline = time.monotonic() + patience
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def killed(*command: str) -> int:
    """Start a rank, kill it after it has printed "up", and return the process id of its child."""
    rank = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True)
    word, pid = rank.stdout.readline().split()
    assert word == "up" and alive(int(pid))
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    return int(pid)


def test_a_spawned_process_ends_with_a_rank_that_is_killed():
    assert ended(killed("-c", RANK), patience=30)


@pytest.mark.parametrize("follows", [True, False])
def test_a_manager_ends_with_a_rank_that_is_killed(tmp_path, follows):
    """Without follow_rank() the manager stays."""
    (tmp_path / "rank.py").write_text(WITH_MANAGER.format(follows=follows))
    pid = killed(str(tmp_path / "rank.py"))
    try:
        assert ended(pid, patience=30 if follows else 1) == follows
    finally:
        if not follows:
            os.kill(pid, signal.SIGKILL)


def test_a_process_whose_rank_is_gone_already_does_not_begin():
    done = subprocess.run(
        [sys.executable, "-c", CHILD], env={**os.environ, "ZAYA_RANK_PID": "1"}, stdout=subprocess.PIPE, timeout=60
    )
    assert done.returncode == 1 and done.stdout == b""
    assert "ZAYA_RANK_PID" not in os.environ, "tests are no ranks"
