# SPDX-License-Identifier: Apache-2.0
"""The lock of an output, by processes. tests/checkpoint/test_run_lock.py holds the rules of all locks."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from zaya_plugin.ground import lock as locks
from zaya_plugin.ground.lock import Lock, locked

HOLDER = """
import sys, time
from zaya_plugin.ground.lock import locked
with locked(sys.argv[1], "writing"):
    print("held", flush=True)
    time.sleep(600)
"""


def test_it_names_its_holder_and_ends_with_it(tmp_path):
    output = tmp_path / "below" / "output"
    with subprocess.Popen([sys.executable, "-c", HOLDER, output], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(ValueError, match=f"--output={output}: .*is writing .*process {holder.pid} on"):
            with locked(output, "writing"):
                pass
        holder.send_signal(signal.SIGKILL)
    left = tmp_path / "below" / "output.lock.1"
    assert left.exists()
    with locked(output, "writing"):
        pass
    assert not left.exists()


@pytest.fixture
def far(tmp_path):
    """A lock of another machine: its name and its file."""
    lock = Lock.acquire([tmp_path / "lock"], lambda held: ValueError(held), launch="one")
    (file,) = lock.files
    file.write_text(json.dumps({**json.loads(file.read_text()), "machine": "node7 boot pid", "token": "far"}) + "\n")
    return tmp_path / "lock", file


def test_an_owner_on_another_machine_is_waited_for(far, monkeypatch):
    monkeypatch.setattr(locks, "CHECK_SECONDS", 0.01)
    name, file = far
    hosts, began = [], time.monotonic()
    with pytest.raises(ValueError, match="process .* on node7"):
        Lock.acquire([name], lambda held: ValueError(held), patience=0.2, waits=lambda held: hosts.append(held.host))
    assert hosts == ["node7"] and time.monotonic() - began >= 0.2
    with Lock.acquire([name], lambda held: ValueError(held), patience=60, waits=lambda held: file.unlink()) as lock:
        assert lock.why_lost() is None
    assert list(name.parent.iterdir()) == []


def test_an_owner_learns_that_its_lock_was_taken(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.01)
    lock, told = Lock.acquire([tmp_path / "lock"], lambda held: ValueError(held)), threading.Event()
    lock.lost = told.set
    (tmp_path / "lock.1").unlink()
    assert told.wait(60) and lock.why_lost() == (tmp_path, "its lock was removed")


def test_an_output_that_another_process_has_taken_over_is_reported(tmp_path, far):
    name, file = far
    with pytest.raises(ValueError, match="this process lost its lock: it was taken over by process .* on node7"):
        with locked(tmp_path / "out", "writing"):
            file.rename(tmp_path / "out.lock.2")


def test_a_generation_that_was_free_again_is_judged_again(tmp_path, far, monkeypatch):
    """Between the judgement of a dead owner and the next generation, another process may have taken and released that
    one, and a third may have begun at 1.
    """
    name, file = far
    dead, create = tmp_path / "lock.3", os.open
    file.rename(dead)
    os.utime(dead, (0, 0))
    taken = []

    def create_late(path, flags, mode=0o777):
        if not taken:
            taken.append(True)
            dead.unlink()
            taken.append(Lock.acquire([name], lambda held: ValueError(held)))
        return create(path, flags, mode)

    monkeypatch.setattr(locks.os, "open", create_late)
    with pytest.raises(ValueError, match="lock.1|generation 1"):
        Lock.acquire([name], lambda held: ValueError(held))
    assert taken[1].why_lost() is None and [path.name for path in tmp_path.iterdir()] == ["lock.1"]
    taken[1].release()
