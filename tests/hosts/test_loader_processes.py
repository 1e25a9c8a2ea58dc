# SPDX-License-Identifier: Apache-2.0
"""The processes that read a rank's data."""

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from torch.utils.data import _utils

from zaya_plugin.ground.parent_death import started
from zaya_plugin.hosts import loader_processes


@pytest.fixture
def as_torch_leaves_it(monkeypatch):
    """Of torch: a handler that raises for a loader that was killed."""

    def handler(*_):
        raise RuntimeError("DataLoader worker is killed by signal: Killed.")

    monkeypatch.setattr(_utils, "python_exit_status", False)
    before = signal.signal(signal.SIGCHLD, handler)
    yield
    signal.signal(signal.SIGCHLD, before)


def _ignore_and_sleep(told):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Megatron's loaders, in effect
    told.set()
    time.sleep(600)


def test_loaders_that_ignore_sigterm_are_ended(as_torch_leaves_it):
    fork = multiprocessing.get_context("fork")
    told = [fork.Event(), fork.Event()]
    loaders = [fork.Process(target=_ignore_and_sleep, args=(each,), daemon=True) for each in told]
    for loader, event in zip(loaders, told, strict=True):
        loader.start()
        assert event.wait(20)
    loader_processes.end()
    assert [loader.exitcode for loader in loaders] == 2 * [-signal.SIGKILL]


RANK = """
import os, sys, threading, time
from zaya_plugin.hosts import loader_processes

loader_processes.DEVICE_FILES = (sys.argv[1] + "/dri",)
device, other = open(sys.argv[1] + "/dri/renderD128"), open(sys.argv[1] + "/data.bin")
loader_processes.prepare(1)

def tell(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def fork(name, again=False):
    if os.fork() == 0:
        if again:
            fork("nested")
        held = [os.path.exists(f"/proc/self/fd/{each.fileno()}") for each in (device, other)]
        tell(name, os.getpid(), *map(int, held))
        time.sleep(600)

fork("loader", again=True)
thread = threading.Thread(target=fork, args=("thread",))
thread.start()
thread.join()
tell("joined")
time.sleep(600)
"""


def test_a_fork_holds_no_device_and_ends_with_its_rank(tmp_path):
    (tmp_path / "dri").mkdir()
    for name in ("dri/renderD128", "data.bin"):
        (tmp_path / name).touch()
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK, str(tmp_path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        lines = dict(rank.stdout.readline().strip().partition(" ")[::2] for _ in range(4))
        assert set(lines) == {"loader", "nested", "thread", "joined"}
        pids, held = {}, {}
        for name in ("loader", "nested", "thread"):
            pids[name], *held[name] = map(int, lines[name].split())
        assert held == dict.fromkeys(held, [0, 1])  # the data stay open
        rank.kill()
        rank.wait()
        deadline = time.monotonic() + 60
        while started(pids["loader"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert started(pids["thread"]) and started(pids["nested"])
    finally:
        os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()


@pytest.mark.slow
def test_a_folder_whose_name_is_too_long_for_sockets_is_refused(tmp_path):
    code = "from zaya_plugin.hosts import loader_processes; loader_processes.prepare(1)"
    for folder, refused in ((tmp_path / ("long" * 20), True), (tempfile.mkdtemp(dir="/tmp"), False)):
        os.makedirs(folder, exist_ok=True)
        environment = {**os.environ, "TMPDIR": str(folder)}
        done = subprocess.run([sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True)
        assert (done.returncode != 0) == refused, done.stderr
        assert (
            f"TMPDIR={folder}: data loaders (data.num_workers) cannot make a socket there" in done.stderr
        ) == refused
