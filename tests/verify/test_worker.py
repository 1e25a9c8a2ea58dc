# SPDX-License-Identifier: Apache-2.0
"""Test that no line of `zaya verify` can end the command: a crash, an exit or a hang is that line's "wrong"."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zaya_plugin.verify import guard
from zaya_plugin.verify.line import Line
from zaya_plugin.verify.worker import MARK, Worker, environment


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


@pytest.mark.first_cases(1)
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


@pytest.mark.slow
def test_a_hang_ends_with_its_children(worker, first):
    worker.run(line("good", argument="start"))
    worker.said.clear()
    begin = time.monotonic()
    found = worker.run(line("hangs", limit_s=2))
    assert found.state == "wrong" and found.reason == "not done in 2 s; the process was killed"
    assert "in hangs" in found.traceback, "the log says where it was"
    assert time.monotonic() - begin < 60
    child = int(next(text for text in worker.said if text))
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:
        if " Z " in open(f"/proc/{child}/stat").read():
            break
        time.sleep(0.05)
    else:
        assert not os.path.exists(f"/proc/{child}"), "a child of the line goes on"


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", ["hangs_in_ranks", "hangs_without_its_launcher", "crashes_beside_ranks"])
def test_ranks_end_with_their_line(worker, first, name):
    worker.run(line("good", argument="start"))
    worker.said.clear()
    assert worker.run(line(name, limit_s=2)).state == "wrong"
    launcher, rank = map(int, next(text for text in worker.said if text).split())
    for pid in (launcher, rank):
        assert not os.path.exists(f"/proc/{pid}") or " Z " in open(f"/proc/{pid}/stat").read(), "still there"


# `zaya verify` with a line of faulty_lines
COMMAND = """
import sys
from zaya_plugin import cli
from zaya_plugin.verify import command
from zaya_plugin.verify.line import Line
command.LINES = {"rates": command.LINES["rates"], "faulty": Line("faulty", "", "", "", sys.argv[1], 60)}
sys.exit(cli.main(["verify", "--device", "cpu", *sys.argv[2:]]))
"""


def started_by(command: subprocess.Popen) -> dict[int, str]:
    """Return the processes that this `zaya verify` has started, but its guard, with their command lines."""
    found = {}
    for pid in guard.marked(f"{MARK}={command.pid}-"):
        with contextlib.suppress(OSError):  # it has ended
            found[pid] = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return found


def killed(words: list[str], number: int, up) -> tuple[int, list[str]]:
    """Start `words`, send them a signal when `up(processes)` is true; return the exit code and what is left after it.
    The time that processes have to end is half of what the guard has.
    """
    command = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 240
        while not up(list(started_by(command).values())):
            assert command.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        command.send_signal(number)
        code = command.wait(2 * guard.KILLED_S)
        deadline = time.monotonic() + guard.KILLED_S / 2
        while started_by(command) and time.monotonic() < deadline:
            time.sleep(0.1)
        return code, list(started_by(command).values())
    finally:
        command.kill()
        for pid in started_by(command):
            os.kill(pid, signal.SIGKILL)


SLOW = pytest.mark.slow
SIGNALS = [signal.SIGTERM, signal.SIGKILL, pytest.param(signal.SIGINT, marks=SLOW)]


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("number", [*SIGNALS, pytest.param(signal.SIGHUP, marks=SLOW)])
def test_a_killed_command_leaves_no_process(tmp_path, number):
    """Ranks that hang in sessions of their own, below a launcher that has ended."""
    line, out = "tests.verify.faulty_lines:hangs_without_its_launcher", tmp_path / "v.json"
    code, left = killed(
        [sys.executable, "-c", COMMAND, line, "--out", str(out)],
        number,
        lambda lines: any("time.sleep(600)" in each for each in lines) and not any("Popen" in each for each in lines),
    )
    assert code == (-number if number == signal.SIGKILL else 128 + number) and not left, left
    record = json.loads(out.read_text())
    assert not record["complete"] and [each["line"] for each in record["lines"]] == ["rates"]


@SLOW
@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize(
    ("line", "rank"), [("zaya1_base", "step_rank"), ("demo_losses", "loss_rank"), ("all_reduce", "collective_rank")]
)
def test_the_ranks_of_a_line_end_with_a_killed_command(tmp_path, line, rank, number):
    words = [sys.executable, "-m", "zaya_plugin.cli", "verify", "--device", "cpu", "--only", line]
    code, left = killed(
        [*words, "--out", str(tmp_path / "v.json")],
        number,
        lambda lines: any(rank in each and "torch.distributed" not in each for each in lines),
    )
    assert code and not left, left


@pytest.mark.slow
def test_without_its_guard_a_worker_s_ranks_end_too(worker, first):
    worker.run(line("good", argument="start"))
    worker.guard.kill()
    worker.said.clear()
    worker.run(line("hangs_without_its_launcher", limit_s=2))
    launcher, rank = map(int, next(text for text in worker.said if text).split())
    assert not os.path.exists(f"/proc/{rank}") or " Z " in open(f"/proc/{rank}/stat").read(), "still there"


def test_a_device_that_does_not_answer_is_not_tried_for_every_line(tmp_path, monkeypatch):
    from zaya_plugin.verify import worker as module

    monkeypatch.setattr(module, "READY_S", 0.01)
    stuck = Worker("cpu", tmp_path)
    assert [stuck.run(line("good", argument="x")).state for _ in range(4)] == ["wrong", "wrong", "skipped", "skipped"]


def test_variables_of_a_launcher_are_left_out():
    given = {"RANK": "3", "SLURM_PROCID": "3", "MASTER_ADDR": "a", "PATH": "/bin", "HIP_VISIBLE_DEVICES": "0"}
    assert environment(given, "auto") == {"PATH": "/bin", "HIP_VISIBLE_DEVICES": "0"}
    assert environment(given, "cpu") == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
