# SPDX-License-Identifier: Apache-2.0
"""Test that no line of `zaya verify` can end the command: a crash, an exit or a hang is that line's "wrong"."""

import os
import time

import pytest

from zaya_plugin.verify.line import Line
from zaya_plugin.verify.worker import Worker, environment


def line(name: str, limit_s: int = 60, argument: str | None = None) -> Line:
    return Line(name, "", "", "", f"tests.verify.faulty_lines:{name}", limit_s, argument)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    said = []
    worker = Worker("cpu", tmp_path_factory.mktemp("worker"), lambda text: said.append(text))
    worker.said = said
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def first(worker):
    """The outcome of a good line; the process goes on to the next one."""
    return worker.run(line("good", argument="hello"))


def test_a_good_line(worker, first):
    assert (first.state, first.reason) == ("pass", "hello on cpu") and "half way" in worker.said
    assert worker.machine == {"device": "cpu", "devices": 0, "name": worker.machine["name"]}
    again = worker.run(line("good", argument="again"))
    assert again.figures == first.figures, "the process goes on"


@pytest.mark.parametrize(
    ("name", "reason", "log"),
    [
        ("raises", "RuntimeError: an illegal memory access", "in raises"),
        ("crashes", "the process was killed by SIGSEGV", "the last words"),
        ("leaves", "the process ended with exit code 7", "== leaves"),
    ],
)
def test_a_failure_is_the_line_s_and_the_next_line_runs(worker, first, name, reason, log):
    before = worker.run(line("good", argument="before")).figures
    found = worker.run(line(name))
    assert found.state == "wrong" and found.reason == reason and log in found.traceback
    after = worker.run(line("good", argument="after"))
    assert after.state == "pass" and after.figures != before, "a new process"


def test_a_hang_ends_with_its_children(worker, first):
    worker.run(line("good", argument="start"))
    worker.said.clear()
    begin = time.monotonic()
    found = worker.run(line("hangs", limit_s=2))
    assert found.state == "wrong" and found.reason == "not done in 2 s; the process was killed"
    assert "in hangs" in found.traceback, "the log says where it was"
    assert time.monotonic() - begin < 10
    child = int(next(text for text in worker.said if text))
    deadline = time.monotonic() + 5
    while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:
        if " Z " in open(f"/proc/{child}/stat").read():
            break
        time.sleep(0.05)
    else:
        assert not os.path.exists(f"/proc/{child}"), "a child of the line goes on"


@pytest.mark.parametrize("name", ["hangs_in_ranks", "hangs_without_its_launcher", "crashes_beside_ranks"])
def test_ranks_end_with_their_line(worker, first, name):
    worker.run(line("good", argument="start"))
    worker.said.clear()
    assert worker.run(line(name, limit_s=4)).state == "wrong"
    launcher, rank = map(int, next(text for text in worker.said if text).split())
    for pid in (launcher, rank):
        assert not os.path.exists(f"/proc/{pid}") or " Z " in open(f"/proc/{pid}/stat").read(), "still there"


def test_a_device_that_does_not_answer_is_not_tried_for_every_line(tmp_path, monkeypatch):
    from zaya_plugin.verify import worker as module

    monkeypatch.setattr(module, "READY_S", 0.01)
    stuck = Worker("cpu", tmp_path)
    assert [stuck.run(line("good", argument="x")).state for _ in range(4)] == ["wrong", "wrong", "skipped", "skipped"]


def test_variables_of_a_launcher_are_left_out():
    given = {"RANK": "3", "SLURM_PROCID": "3", "MASTER_ADDR": "a", "PATH": "/bin", "HIP_VISIBLE_DEVICES": "0"}
    assert environment(given, "auto") == {"PATH": "/bin", "HIP_VISIBLE_DEVICES": "0"}
    assert environment(given, "cpu") == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
