# SPDX-License-Identifier: Apache-2.0
"""The lock of a run directory: live, dead, stopped and far owners, and two starts at the same moment."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from zaya_plugin.checkpoint import run_lock
from zaya_plugin.checkpoint.run_lock import LOCKS, LostLockError, RunLock
from zaya_plugin.ground import lock as locks
from zaya_plugin.ground.lock import EXPIRES

HOLDER = """
import sys, time
from pathlib import Path
from zaya_plugin.checkpoint.run_lock import RunLock
try:
    lock = RunLock.take({"run_dir": Path(sys.argv[1])})
except ValueError as error:
    sys.exit(str(error))
print("has it", flush=True)
sys.stdin.readline()
lock.release()
"""


def holder(directory):
    words = [sys.executable, "-c", HOLDER, str(directory)]
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.fixture
def owner(tmp_path):
    """Another process that holds the lock."""
    process = holder(tmp_path)
    assert process.stdout.readline() == "has it\n"
    yield process
    process.kill()
    process.communicate()


def names(directory):
    return sorted(path.name for path in directory.iterdir())


def far(file, **values):
    """Rewrite a lock as one of another machine."""
    first, *more = file.read_text().splitlines()
    changed = {**json.loads(first), "machine": "node7 other-boot pid:[1]", **values}
    file.write_text("\n".join([json.dumps(changed), *more]) + "\n")


def age(file, seconds):
    os.utime(file, times=(time.time() - seconds,) * 2)


def take(directory):
    return RunLock.take({"run_dir": directory})


def test_a_second_start_is_refused_with_who_since_when_and_how_to_go_on(tmp_path, owner):
    with pytest.raises(ValueError) as refused:
        take(tmp_path)
    text = str(refused.value)
    assert text.startswith(
        f"run_dir={tmp_path}: a run is writing there: process {owner.pid} on {os.uname().nodename}, "
    )
    assert (
        ", since 2" in text and ", generation 1. Allowed: one run at a time. Fix: run_dir=<another directory>" in text
    )
    assert f"`kill {owner.pid}` there, which saves first" in text
    assert names(tmp_path) == ["run.lock.1"], "nothing is left of the refused start"


def test_a_released_lock_and_one_of_a_killed_owner_are_free(tmp_path, owner):
    owner.kill()
    owner.wait()
    lock = take(tmp_path)
    assert names(tmp_path) == ["run.lock.2"]
    lock.check(now=True)
    lock.release()
    assert names(tmp_path) == []


def test_a_reused_process_id_is_no_owner(tmp_path, owner):
    file = tmp_path / "run.lock.1"
    first = json.loads(file.read_text())
    file.write_text(json.dumps({**first, "start": first["start"] + 1}) + "\n")
    assert take(tmp_path).files == [tmp_path / "run.lock.2"]


def test_a_stopped_owner_of_this_machine_keeps_its_lock_however_long(tmp_path, owner):
    os.kill(owner.pid, signal.SIGSTOP)
    age(tmp_path / "run.lock.1", 100 * EXPIRES)
    with pytest.raises(ValueError, match="a run is writing there"):
        take(tmp_path)
    os.kill(owner.pid, signal.SIGCONT)


def test_a_far_owner_holds_until_its_last_sign_of_life_is_old(tmp_path, owner):
    file = tmp_path / "run.lock.1"
    far(file)
    age(file, EXPIRES - 20)
    with pytest.raises(ValueError, match=r"on node7, .* wait until its last sign of life \(4\d s ago\) is 60 s old"):
        take(tmp_path)
    age(file, EXPIRES + 1)
    assert take(tmp_path).files == [tmp_path / "run.lock.2"]


def test_a_stopped_far_owner_that_goes_on_finds_that_it_has_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "CHECK_SECONDS", 0.0)
    first = take(tmp_path)
    first.check()
    far(tmp_path / "run.lock.1")
    age(tmp_path / "run.lock.1", EXPIRES + 1)
    second = take(tmp_path)
    with pytest.raises(LostLockError, match=r"it was taken over by process \d+ on .*, generation 2, after this run"):
        first.check()
    first.release()
    second.check()
    assert names(tmp_path) == ["run.lock.2"], "the loser does not remove the winner's lock"
    second.release()
    third = take(tmp_path)
    assert names(tmp_path) == ["run.lock.1"], "the name of the first owner's file is used again"
    with pytest.raises(LostLockError):
        first.check()
    third.check()


def test_a_loser_gives_no_sign_of_life_for_the_winner(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "BEAT_SECONDS", 0.05)
    lock = take(tmp_path)
    file = tmp_path / "run.lock.1"
    age(file, 1000)
    deadline = time.monotonic() + 60
    while time.time() - file.stat().st_mtime > 500 and time.monotonic() < deadline:
        time.sleep(0.02)
    assert time.time() - file.stat().st_mtime < 500, "the owner's own sign of life"
    far(file, token="another")
    age(file, 1000)
    time.sleep(0.3)
    assert time.time() - file.stat().st_mtime > 500
    lock.release()
    assert names(tmp_path) == ["run.lock.1"]


def test_of_many_starts_one_wins_also_over_a_dead_owner(tmp_path, owner):
    owner.kill()
    owner.wait()
    starts = [holder(tmp_path) for _ in range(4)]
    deadline = time.monotonic() + 60
    while sum(start.poll() is not None for start in starts) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    (winner,) = [start for start in starts if start.poll() is None]
    refused = [start.communicate()[1] for start in starts if start is not winner]
    assert all("a run is writing there" in text for text in refused)
    assert winner.stdout.readline() == "has it\n"
    winner.communicate("done\n")
    assert winner.returncode == 0 and names(tmp_path) == []


def test_a_lock_without_content_is_that_of_a_start_in_progress_and_expires(tmp_path):
    (tmp_path / "run.lock.3").touch()
    with pytest.raises(ValueError, match=r"a start that is just beginning \(run.lock.3\)"):
        take(tmp_path)
    age(tmp_path / "run.lock.3", EXPIRES + 1)
    assert take(tmp_path).files == [tmp_path / "run.lock.4"]


def contents():
    """What may stand in a lock's file in place of its content: damaged, of an earlier or a later version."""
    whole = {"token": "a", "machine": "node7 boot pid:[1]", "launch": None, "attempt": None, "since": 1e9}
    whole |= {"pid": 1, "start": 1}
    yield from (b"\n", b"{}", b"[]", b"null", b"7", b"\xff\xfe\x00", b"[" * 100_000, json.dumps(whole).encode()[:-9])
    for name in ("token", "machine", "since", "pid", "start"):
        yield json.dumps({key: value for key, value in whole.items() if key != name}).encode()
    for name, values in (("machine", ("", " ", 7)), ("since", ("x", 1e300, -1.0)), ("pid", ("x", None, [1]))):
        yield from (json.dumps({**whole, name: value}).encode() for value in values)
    for name, value in (("start", "x"), ("attempt", "x"), ("launch", 7), ("token", None)):
        yield json.dumps({**whole, name: value}).encode()


@pytest.mark.parametrize("content", list(contents()), ids=lambda content: repr(content[:60]))
def test_a_lock_that_cannot_be_read_holds_for_60_s_without_a_sign_of_life(tmp_path, content, monkeypatch):
    monkeypatch.setenv("ZAYA_AEGIS_RUN", "run")
    file = tmp_path / "run.lock.3"
    file.write_bytes(content)
    for start in (take, lambda directory: run_lock.check_free({"run_dir": directory})):
        with pytest.raises(
            ValueError, match=r"the owner of run.lock.3, which is damaged or of another version\. .* wait"
        ):
            start(tmp_path)
    age(file, EXPIRES + 1)
    lock = take(tmp_path)
    assert names(tmp_path) == ["run.lock.4"]
    lock.files[0].write_bytes(content)
    with pytest.raises(LostLockError, match="This run stops and writes nothing more"):
        lock.check(now=True)
    lock.release()
    assert lock.files[0].read_bytes() == content, "not known to be its own"


def test_the_lock_holds_while_rank_0_lives_without_its_launcher(tmp_path, owner, monkeypatch):
    file = tmp_path / "run.lock.1"
    token = json.loads(file.read_text())["token"]
    monkeypatch.setenv(LOCKS, json.dumps({"files": [str(file)], "token": token}))
    rank_0 = RunLock.of_launcher()
    owner.kill()
    owner.wait()
    with pytest.raises(ValueError, match="a run is writing there"):
        take(tmp_path)
    rank_0.release()
    take(tmp_path).release()


def test_a_restart_of_the_same_launch_on_another_node_waits_for_the_lock(tmp_path, owner, monkeypatch):
    monkeypatch.setattr(locks, "EXPIRES", 2.0)
    monkeypatch.setattr(locks, "CHECK_SECONDS", 0.1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job7")
    file = tmp_path / "run.lock.1"
    far(file, launch="job7")
    assert take(tmp_path).files == [tmp_path / "run.lock.2"], "the owner before was silent"
    far(tmp_path / "run.lock.2", launch="none")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ValueError, match="a run is writing there"):
        take(tmp_path)


def test_two_directories_are_taken_together_or_not_at_all(tmp_path, owner):
    other = tmp_path / "other"
    with pytest.raises(ValueError, match=f"^checkpoint.path={tmp_path}: a run is writing there"):
        RunLock.take({"run_dir": other, "checkpoint.path": tmp_path})
    assert names(other) == []


def test_a_dry_run_finds_a_held_lock_and_writes_nothing(tmp_path, owner):
    free = {"checkpoint.path": tmp_path / "nowhere"}
    run_lock.check_free(free)
    with pytest.raises(ValueError, match=f"^run_dir={tmp_path}: a run is writing there: process {owner.pid} on "):
        run_lock.check_free({**free, "run_dir": tmp_path})
    assert names(tmp_path) == ["run.lock.1"]
    far(tmp_path / "run.lock.1")
    with pytest.raises(ValueError, match="process .* on node7"):
        run_lock.check_free({"run_dir": tmp_path})
    age(tmp_path / "run.lock.1", EXPIRES + 1)
    run_lock.check_free({"run_dir": tmp_path})
    owner.kill()
    owner.wait()
