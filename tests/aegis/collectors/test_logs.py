# SPDX-License-Identifier: Apache-2.0
"""Logs of the ranks and the kernel: what is appended, truncated, replaced, binary, or megabytes long."""

import os
import time

import pytest

from zaya_plugin.aegis.collectors import tail
from zaya_plugin.aegis.collectors.kernel_log import KernelLog
from zaya_plugin.aegis.collectors.tail import Tail, stamp


def append(path, content):
    with open(path, "ab") as file:
        file.write(content)


def test_lines_come_once_and_only_when_they_are_complete(tmp_path):
    path = tmp_path / "rank0.log"
    log = Tail(path)
    assert log.lines() == []  # not there yet
    append(path, b"one\ntw")
    assert log.lines() == [b"one"] and log.lines() == []
    append(path, b"o\n\nthree\r\n 10%\r 20%\r")
    assert log.lines() == [b"two", b"three", b" 10%", b" 20%"]


def test_truncated_and_replaced_files_are_read_from_their_start(tmp_path):
    path = tmp_path / "rank0.log"
    append(path, b"a long first line\nrest without an end")
    log = Tail(path)
    assert log.lines() == [b"a long first line"]
    path.write_bytes(b"new\n")
    assert log.lines() == [b"rest without an end", b"new"]
    path.write_bytes(b"longer than all that was read of it\n")
    assert log.lines() == [b"longer than all that was read of it"]
    path.rename(tmp_path / "rotated")
    path.touch()
    append(tmp_path / "rotated", b"before the writer knew\n")
    assert log.lines() == [b"before the writer knew"]
    append(path, b"of another file\n")
    append(tmp_path / "rotated", b"last\n")
    assert log.lines() == [b"last"] and log.lines() == [b"of another file"]
    path.unlink()
    assert log.lines() == []


def test_the_output_of_a_process_is_read_under_every_name(tmp_path):
    path = tmp_path / "rank0.log"
    with open(path, "ab+", buffering=0) as out:
        log = Tail(path, os.dup(out.fileno()))
        out.write(b"one\n")
        assert log.read() == b"one\n"
        path.rename(tmp_path / "rank0.log.1")
        path.write_bytes(b"of a stranger\n")
        out.write(b"two\n")
        assert log.read() == b"two\n" and log.read() == b""
        (tmp_path / "rank0.log.1").unlink()
        out.write(b"three\n")
        assert log.read() == b"three\n" and not log.closed
        log.close()
        assert log.closed and log.read() == b""


def test_a_line_of_megabytes_is_cut_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / "rank0.log"
    append(path, b"x" * 5_000_000)
    log = Tail(path)
    for _ in range(4):
        assert log.lines() == [] and len(log._part) == tail.LINE
    append(path, b"\nnext\n")
    assert log.lines() == [b"x" * tail.LINE, b"next"]


def test_a_file_that_grows_faster_than_it_is_read_is_skipped_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(tail, "BACKLOG", 1000)
    monkeypatch.setattr(tail, "AT_ONCE", 100)
    path = tmp_path / "rank0.log"
    append(path, b"".join(b"line %04d\n" % i for i in range(500)))
    log = Tail(path)
    assert log.lines() == [b"line %04d" % i for i in range(491, 500)]


def test_a_pipe_is_read_without_waiting(tmp_path):
    path = tmp_path / "kmsg"
    os.mkfifo(path)
    log = Tail(path)
    assert log.lines() == []
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(writer, b"first\nsec")
    assert log.lines() == [b"first"] and log.lines() == []
    os.close(writer)
    assert log.lines() == []


def test_a_line_says_itself_when_it_was_written():
    now = time.mktime(time.strptime("2026-11-22 10:00:05", "%Y-%m-%d %H:%M:%S"))
    assert stamp("[rank1]:[E1122 10:00:00.123000 4242 ProcessGroupNCCL.cpp:683] Watchdog", now) == now - 5 + 0.123
    assert stamp("2026-11-22 10:00:04,500 ERROR x", now) == now - 0.5
    assert stamp("2026-11-22 09:00:00,000 quoted from an old log", now) == now
    assert stamp("E1399 99:00:00.1 no date", now) == now and stamp("no stamp", now) == now


@pytest.mark.parametrize("form", ["3,42,{micro},-;{text}\n SUBSYSTEM=pci\n", "[{seconds:12.6f}] {text}\n", "{text}\n"])
def test_kernel_lines_get_the_wall_time_of_their_stamp(tmp_path, form):
    path, text = tmp_path / "kmsg", "amdgpu 0000:dd:00.0: {1}uncorrectable hardware error detected!"
    log = KernelLog("n1", path)
    seconds = time.monotonic() - 2.0
    append(path, form.format(micro=int(seconds * 1e6), seconds=seconds, text=text).encode())
    found = log.poll(time.time())
    assert found[0].text == text and found[0].source == "kernel" and found[0].rule is None
    expected = time.time() - (0 if form.startswith("{text") else 2.0)
    assert found[0].time == pytest.approx(expected, abs=0.2)


def test_a_stamp_of_another_boot_is_no_time(tmp_path):
    path, now = tmp_path / "recorded", time.time()
    log = KernelLog("n1", path)
    append(path, b"[    3.000001] from a recording\n3,1,99999999999999999,-;from the future\n")
    assert [e.time for e in log.poll(now)][1] == now


def test_a_stalled_file_server_is_known_until_it_answers(tmp_path):
    path = tmp_path / "kmsg"
    log = KernelLog("n1", path)
    append(path, b"nfs: server fs1 not responding, still trying\n")
    append(path, b"Lustre: a-OST1-osc: Connection to a-OST1 (at 10.0.0.1@tcp) was lost; in progress operations wait\n")
    assert len(log.poll(time.time())) == 2 and log.stalled
    append(path, b"nfs: server fs1 OK\n")
    log.poll(time.time())
    assert log.stalled
    append(path, b"Lustre: a-OST1-osc: Connection restored to 10.0.0.1@tcp (at 10.0.0.1@tcp)\n")
    log.poll(time.time())
    assert not log.stalled


def test_a_kernel_log_that_does_not_exist_is_silent(tmp_path):
    log = KernelLog("n1", tmp_path / "none")
    assert log.poll(time.time()) == []


@pytest.mark.parametrize(
    "line, month, day",
    [
        ("[E813 10:00:00.123 ProcessGroup.cpp:7] x", 8, 13),  # torch's C++ side: month * 100 + day
        ("[E1122 10:00:00.123 ProcessGroup.cpp:7] x", 11, 22),
        ("[rank3]:E0813 10:00:00.123000 41 torch/x.py:1] x", 8, 13),  # its Python side
    ],
)
def test_a_month_of_one_digit_is_read_too(line, month, day):
    at = time.mktime((time.localtime().tm_year, month, day, 10, 0, 0, 0, 0, -1)) + 0.123
    assert stamp(line, at + 2) == pytest.approx(at)
