# SPDX-License-Identifier: Apache-2.0
"""Test `zaya bench storage`: what it measures, what it leaves, and its messages."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace

import pytest

from zaya_plugin import cli
from zaya_plugin.bench import storage

MIB = 2**20


def test_all_accesses_are_measured_and_nothing_is_left(tmp_path, capsys):
    words = ("bench", "storage", str(tmp_path), "--size", "2M", "--seconds", "0.02", "--output", str(tmp_path / "out"))
    assert cli.main([*words]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    record = json.loads((tmp_path / "out" / "storage.json").read_text())
    assert record["schema"] == "zaya bench storage/1" and record["path"] == str(tmp_path)
    rows = record["rows"]
    reads = [row for row in rows if row["access"] == "random read"]
    assert [row["threads"] for row in reads] == [1, 2, 4, 8, 16, 32]
    assert [row["access"] for row in rows if row not in reads] == [
        "write, synced at the end",
        "read",
        "random write and fsync",
    ]
    assert all(row["mb_per_s"] > 0 for row in rows)
    for row in rows[2:]:
        assert row["p50_ms"] <= row["p99_ms"] <= row["max_ms"]
    assert "caches of servers, controllers and drives were not" in capsys.readouterr().out


def test_what_is_written_is_read_and_no_page_is_read_twice(tmp_path, monkeypatch):
    pages, reads = [], []
    with open(tmp_path / "file", "w+b", buffering=0) as stream:
        file, pread, read = stream.fileno(), os.pread, os.read
        assert storage.written(file, 2 * MIB + 100) > 0 and (tmp_path / "file").stat().st_size == 2 * MIB + 100
        monkeypatch.setattr(os, "read", lambda *words: reads.append(len(data := read(*words))) or data)
        storage.read_back(file)
        assert sum(reads) == 2 * MIB + 100
        monkeypatch.setattr(os, "pread", lambda *words: pages.append(words[2]) or pread(*words))
        times = storage.random_reads(file, [*range(511, -1, -1)], 4, 60.0)
    assert len(times) == 512 and sorted(pages) == list(range(0, 2 * MIB, 4096)) and pages != sorted(pages)


def test_figures_of_small_accesses():
    row = storage.row_of("random read", [0.001] * 98 + [0.002, 0.1], 4)
    assert (row["iops"], row["mb_per_s"]) == pytest.approx((2000, 8.192))
    assert (row["p50_ms"], row["p99_ms"], row["max_ms"]) == pytest.approx((1, 2.98, 100))


def test_a_path_over_the_training_network_is_warned_of(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(storage, "THREADS", (1,))
    network = ("nfs4", "nfs4 of 10.0.0.9 over eth0, a rail of the training network", True)
    monkeypatch.setattr(storage, "network_of", lambda *unused: network)
    settings = {"size": MIB, "seconds": 0.01, "output": tmp_path / "out", "command": "zaya bench storage"}
    storage.run(Namespace(path=tmp_path, commit="abc", **settings))
    out = capsys.readouterr().out
    assert "WARNING: this path's traffic shares the training network" in out and network[1] in out
    assert json.loads((tmp_path / "out" / "storage.json").read_text())["over_training_network"] is True


def full(*unused):
    raise OSError(errno.ENOSPC, "No space left on device")


def read_only(dir, **unused):
    raise OSError(errno.EROFS, "Read-only file system", str(dir / "tmp"))


@pytest.mark.parametrize(
    ("words", "fault", "text"),
    [
        (("nowhere",), None, "PATH=nowhere: does not exist. Allowed: a folder"),
        (("file",), None, "PATH=file: is not a folder"),
        ((".", "--size", "64K"), None, "--size=65536: is too small"),
        ((".",), ("os.fsync", full), ": No space left on device"),
        ((".",), ("tempfile.TemporaryFile", read_only), ": Read-only file system"),
    ],
)
def test_mistakes_and_failures_are_one_line(tmp_path, monkeypatch, capsys, words, fault, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    if fault:
        monkeypatch.setattr(*fault)
    size = () if "--size" in words else ("--size", "1M")
    assert cli.main(["bench", "storage", *words, *size]) == 2
    error = capsys.readouterr().err
    assert (
        text in error.splitlines()[-1]
        and error.count("zaya: ") == 1
        and [path.name for path in tmp_path.iterdir()] == ["file"]
    )


@pytest.mark.slow
def test_a_killed_measurement_leaves_no_file(tmp_path):
    program = "from zaya_plugin.bench import storage; from pathlib import Path; import sys\n"
    program += "storage.measure(Path(sys.argv[1]), 2**24, 60.0, lambda text: print(text, flush=True))"
    words = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as running:
        while not running.stdout.readline().startswith("random"):
            time.sleep(0.01)
        running.send_signal(signal.SIGKILL)
    assert list(tmp_path.iterdir()) == []
