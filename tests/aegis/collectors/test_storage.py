# SPDX-License-Identifier: Apache-2.0
"""Storage of the run, and the checkpoints in it."""

import errno
import os
import signal
import time

import pytest

from zaya_plugin.aegis.collectors.storage import Checkpoints, Storage, low
from zaya_plugin.checkpoint import manifest
from zaya_plugin.ground.storage_probe import StorageProbe


@pytest.fixture
def probed(tmp_path):
    collector = Storage("n1", tmp_path, patience=60)
    yield collector
    collector.close()


def polled(collector, until, seconds=60.0):
    found, end = [], time.monotonic() + seconds
    while not until(found) and time.monotonic() < end:
        found += collector.poll(time.time())
    return found


def test_a_directory_that_answers_is_silent_and_stays_clean(probed, tmp_path):
    assert [probed.poll(1.0) for _ in range(3)] == [[], [], []]
    assert os.listdir(tmp_path) == []


def test_a_directory_that_does_not_answer_is_reported_once_and_so_is_its_return(probed):
    probed.poll(1.0)
    polled(probed, lambda _: probed._asked is None)
    probed.patience = 0.3
    os.kill(probed._probe.process.pid, signal.SIGSTOP)  # as a process that waits for a dead file server
    stalled = polled(probed, len)
    assert [e.rule for e in stalled] == ["storage_stall"] and probed.hanging
    assert stalled[0].time == pytest.approx(time.time() - stalled[0].values["seconds"], abs=60)
    assert probed.poll(1.0) == []
    os.kill(probed._probe.process.pid, signal.SIGCONT)
    (back,) = polled(probed, len)
    assert back.rule == "storage_stall" and back.values["recovered"] and not probed.hanging
    assert probed.poll(1.0) == []


def test_a_probe_that_was_killed_is_started_again(probed):
    probed.poll(1.0)
    first = probed._probe
    first.process.kill()
    first.process.wait()
    polled(probed, lambda _: probed._probe is not first)
    assert probed._probe is not first and probed.poll(1.0) == [] and not probed.hanging


def test_a_directory_that_is_not_there_yet_is_silent_and_is_watched_once_it_is(tmp_path):
    collector = Storage("n1", tmp_path / "later", patience=60)
    assert polled(collector, len, 0.5) == [] and not collector.hanging
    (tmp_path / "later").write_text("a file")  # no directory can be made or read there
    (found,) = polled(collector, len)
    assert found.rule == "eio" and found.values["errno"] == errno.ENOTDIR
    collector.close()


@pytest.mark.parametrize(
    "answer, rule",
    [
        ({"errno": errno.ENOSPC, "text": "No space left on device"}, "enospc"),
        ({"errno": errno.EROFS, "text": "Read-only file system"}, "erofs"),
        ({"errno": errno.EIO, "text": "Input/output error"}, "eio"),
        ({"free": 10e9, "total": 10e12, "inodes": 10**6, "all_inodes": 10**7}, "disk_low"),
        ({"free": 9e12, "total": 10e12, "inodes": 3, "all_inodes": 10**7}, "disk_low"),
        ({"free": 9e12, "total": 10e12, "inodes": 0, "all_inodes": 0}, None),
    ],
)
def test_answers(probed, monkeypatch, answer, rule):
    monkeypatch.setattr(StorageProbe, "answer", lambda probe, seconds: answer)
    assert [e.rule for e in probed.poll(1.0)] == ([] if rule is None else [rule]) and probed.poll(2.0) == []


def test_two_percent_of_a_large_file_server_are_enough():
    assert low(1e9, 100e9) and not low(3e9, 100e9) and not low(60e9, 10e15) and low(40e9, 10e15)


def checkpoint(directory, step, files=("a.distcp",)):
    folder = directory / f"iter_{step:07d}"
    folder.mkdir(parents=True)
    described = {}
    for name in files:
        (folder / name).write_bytes(b"1234")
        described[name] = manifest.describe(folder / name)
    manifest.write(folder, step, described)
    return folder


def test_checkpoints_are_reported_when_they_become_complete(tmp_path):
    checkpoint(tmp_path, 10)
    collector = Checkpoints("n1", tmp_path)
    assert collector.poll(1.0) == []  # it was there before
    (tmp_path / "iter_0000020").mkdir()
    (tmp_path / "iter_0000020" / "a.distcp").write_bytes(b"12")
    assert collector.poll(2.0) == []
    checkpoint(tmp_path, 30)
    assert [(e.rule, e.values["step"]) for e in collector.poll(3.0)] == [("checkpoint_saved", 30)]
    assert collector.poll(4.0) == []
    (checkpoint(tmp_path, 40) / "a.distcp").write_bytes(b"1")
    assert [(e.rule, e.values["step"]) for e in collector.poll(5.0)] == [("ckpt_broken", 40)]


def test_an_upload_that_does_not_end_is_reported_once(tmp_path):
    collector = Checkpoints("n1", tmp_path, late=100)
    (tmp_path / "iter_0000010.unfinished").mkdir()
    assert collector.poll(1.0) == [] == collector.poll(100.0)
    assert [e.rule for e in collector.poll(102.0)] == ["ckpt_late"] and collector.poll(103.0) == []


def test_a_directory_that_does_not_answer_is_left_alone(tmp_path):
    collector = Checkpoints("n1", tmp_path, stalled=lambda: True)
    assert collector.poll(1.0) == [] and collector._known is None
    assert Checkpoints("n1", tmp_path / "none").poll(1.0) == []
