# SPDX-License-Identifier: Apache-2.0
"""The processes that read a rank's data."""

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from zaya_plugin.hosts import data_loaders
from zaya_plugin.parent_death import started


@pytest.fixture
def handler():
    before = signal.getsignal(signal.SIGCHLD)
    yield
    signal.signal(signal.SIGCHLD, before)


def _ignore_and_sleep(told):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # as Megatron's loaders, in effect
    told.set()
    time.sleep(600)


def test_loaders_that_ignore_sigterm_are_ended(handler):
    fork = multiprocessing.get_context("fork")
    told = fork.Event()
    loader = fork.Process(target=_ignore_and_sleep, args=(told,), daemon=True)
    loader.start()
    assert told.wait(20)
    begun = time.monotonic()
    data_loaders.end()
    assert loader.exitcode == -signal.SIGKILL and time.monotonic() - begun < data_loaders.END_SECONDS
    assert signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL


RANK = """
import os, sys, threading, time
from zaya_plugin.hosts import data_loaders
from zaya_plugin.parent_death import adopt_children

data_loaders.DEVICES = (sys.argv[1] + "/dri",)
device, other = open(sys.argv[1] + "/dri/renderD128"), open(sys.argv[1] + "/data.bin")
adopt_children()
data_loaders.tie_to_rank()

def fork(of_thread):
    if os.fork() == 0:
        held = [os.path.exists(f"/proc/self/fd/{each.fileno()}") for each in (device, other)]
        print(of_thread, os.getpid(), *map(int, held), flush=True)
        time.sleep(600)

fork(0)
thread = threading.Thread(target=fork, args=(1,))
thread.start()
thread.join()
time.sleep(600)
"""


def test_a_fork_holds_no_device_and_ends_with_its_rank(tmp_path):
    (tmp_path / "dri").mkdir()
    for name in ("dri/renderD128", "data.bin"):
        (tmp_path / name).touch()
    rank = subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    lines = sorted([int(word) for word in rank.stdout.readline().split()] for _ in range(2))
    (_, loader, *held), (_, of_thread, *_) = lines
    try:
        assert held == [0, 1]
        assert started(of_thread)  # although its thread has ended
        rank.kill()
        rank.wait()
        deadline = time.monotonic() + 2
        while started(loader):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.kill(of_thread, signal.SIGKILL)
