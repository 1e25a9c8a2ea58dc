# SPDX-License-Identifier: Apache-2.0
"""The processes that read a rank's data."""

import multiprocessing
import os
import signal
import time

import pytest

from zaya_plugin.hosts import data_loaders


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


@pytest.mark.parametrize("there", [True, False])
def test_a_fork_closes_the_devices_and_nothing_else(tmp_path, monkeypatch, there):
    device, other = tmp_path / "dri" / "renderD128", tmp_path / "data.bin"
    device.parent.mkdir()
    monkeypatch.setattr(data_loaders, "DEVICES", (str(device.parent if there else tmp_path / "absent"),))
    data_loaders.close_devices_in_forks()
    with device.open("w") as first, other.open("w") as second:
        child = os.fork()
        if child == 0:
            of_child = {
                os.readlink(f"/proc/self/fd/{each}")
                for each in os.listdir("/proc/self/fd")
                if os.path.exists(f"/proc/self/fd/{each}")
            }
            os._exit((str(device) in of_child) + 2 * (str(other) in of_child))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == (2 if there else 3)
        assert os.fstat(first.fileno()) and os.fstat(second.fileno())
