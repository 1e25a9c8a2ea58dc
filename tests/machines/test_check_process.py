# SPDX-License-Identifier: Apache-2.0
"""Test that no check can end its command: a crash, an exit or a hang is that check's "wrong"."""

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from zaya_plugin.ground import processes
from zaya_plugin.machines.check_process import CheckProcess, environment
from zaya_plugin.machines.checks import Check


def row(name: str, limit_s: int = 60, argument: str | None = None) -> Check:
    return Check(name, "", f"tests.machines.faulty_checks:{name}", limit_s=limit_s, argument=argument)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    texts = []
    worker = CheckProcess("cpu", tmp_path_factory.mktemp("worker"), Path("."), lambda text: texts.append(text))
    worker.texts = texts
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def first(worker):
    """The outcome of a good check; the process goes on to the next one."""
    return worker.run(row("good", argument="hello"))


def test_a_good_check(worker, first):
    assert (first.state, first.reason) == ("pass", "hello on cpu") and "half way" in worker.texts
    assert worker.machine == {"device": "cpu", "devices": 0, "name": worker.machine["name"]}
    again = worker.run(row("good", argument="again"))
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
def test_a_failure_is_the_check_s_and_the_next_check_runs(worker, first, name, reason, log):
    before = worker.run(row("good", argument="before")).figures
    outcome = worker.run(row(name))
    assert outcome.state == "wrong" and outcome.reason == reason and log in outcome.traceback
    after = worker.run(row("good", argument="after"))
    assert after.state == "pass" and after.figures != before, "a new process"


@pytest.mark.slow
def test_a_hang_ends_with_its_children(worker, first):
    worker.run(row("good", argument="start"))
    worker.texts.clear()
    begin = time.monotonic()
    outcome = worker.run(row("hangs", limit_s=2))
    assert outcome.state == "wrong" and outcome.reason == "not done in 2 s; the process was killed"
    assert "in hangs" in outcome.traceback, "the log says where it was"
    assert time.monotonic() - begin < 60
    child = int(next(text for text in worker.texts if text))
    deadline = time.monotonic() + 60
    while os.path.exists(f"/proc/{child}") and time.monotonic() < deadline:
        if " Z " in open(f"/proc/{child}/stat").read():
            break
        time.sleep(0.05)
    else:
        assert not os.path.exists(f"/proc/{child}"), "a child of the line goes on"


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("name", ["hangs_in_ranks", "hangs_without_its_launcher", "crashes_beside_ranks"])
def test_ranks_end_with_their_check(worker, first, name):
    worker.run(row("good", argument="start"))
    worker.texts.clear()
    assert worker.run(row(name, limit_s=2)).state == "wrong"
    launcher, rank = map(int, next(text for text in worker.texts if text).split())
    for pid in (launcher, rank):
        assert not os.path.exists(f"/proc/{pid}") or " Z " in open(f"/proc/{pid}/stat").read(), "still there"


# `zaya verify` with a check of faulty_checks
COMMAND = """
import sys
from zaya_plugin import cli
from zaya_plugin.machines.checks import CHECKS, Check
CHECKS["faulty"] = Check("faulty", "", sys.argv[1], limit_s=60)
sys.exit(cli.main(["verify", "--device", "cpu", "--only", "rates,faulty", *sys.argv[2:]]))
"""


def started_by(command: subprocess.Popen, variable: str) -> dict[int, str]:
    """Return the processes that this `zaya verify` has started, but its guard, with their command lines."""
    lines = {}
    for pid in processes.started_with(variable):
        with contextlib.suppress(OSError):  # it has ended
            line = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            if pid != command.pid and processes.__name__ not in line:
                lines[pid] = line
    return lines


def killed(words: list[str], number: int, up) -> tuple[int, list[str]]:
    """Start `words`, send them a signal when `up(processes)` is true; return the exit code and what is left after it.
    The time that processes have to end is half of what the guard has.
    """
    name, mark = "ZAYA_TEST_MARK", str(time.time_ns())
    environment = {**os.environ, name: mark}
    command = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    started = functools.partial(started_by, command, f"{name}={mark}")
    try:
        deadline = time.monotonic() + 240
        while not up(list(started().values())):
            assert command.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        command.send_signal(number)
        code = command.wait(2 * processes.GUARD_SECONDS)
        deadline = time.monotonic() + processes.GUARD_SECONDS / 2
        while started() and time.monotonic() < deadline:
            time.sleep(0.1)
        return code, list(started().values())
    finally:
        command.kill()
        for pid in started():
            os.kill(pid, signal.SIGKILL)


SLOW = pytest.mark.slow


@pytest.mark.first_cases(1)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP])
def test_a_killed_command_leaves_no_process(tmp_path, number):
    """Ranks that hang in sessions of their own, below a launcher that has ended."""
    line, out = "tests.machines.faulty_checks:hangs_without_its_launcher", tmp_path / "v.json"
    code, left = killed(
        [sys.executable, "-c", COMMAND, line, "--output", str(out)],
        number,
        lambda lines: (
            any("time.sleep(600)" in entry for entry in lines) and not any("Popen" in entry for entry in lines)
        ),
    )
    assert code == (-number if number == signal.SIGKILL else 128 + number) and not left, left
    record = json.loads(out.read_text())
    assert record["running"] == "faulty" and [entry["check"] for entry in record["checks"]] == ["rates"]


@SLOW
@pytest.mark.parametrize(
    ("line", "rank", "number"),
    [
        ("zaya1_base", "step_rank", signal.SIGTERM),
        ("zaya1_base", "step_rank", signal.SIGKILL),
        ("demo_losses", "loss_rank", signal.SIGKILL),
        ("all_reduce", "collective_rank", signal.SIGKILL),
    ],
)
def test_the_ranks_of_a_check_end_with_a_killed_command(tmp_path, line, rank, number):
    words = [sys.executable, "-m", "zaya_plugin.cli", "verify", "--device", "cpu", "--only", line]
    code, left = killed(
        [*words, "--output", str(tmp_path / "v.json")],
        number,
        lambda lines: any(rank in entry and "torch.distributed" not in entry for entry in lines),
    )
    assert code and not left, left


@pytest.mark.slow
def test_without_its_guard_a_worker_s_ranks_end_too(worker, first):
    worker.run(row("good", argument="start"))
    worker.guard.kill()
    worker.texts.clear()
    worker.run(row("hangs_without_its_launcher", limit_s=2))
    launcher, rank = map(int, next(text for text in worker.texts if text).split())
    assert not os.path.exists(f"/proc/{rank}") or " Z " in open(f"/proc/{rank}/stat").read(), "still there"


def test_a_device_that_does_not_answer_is_not_tried_for_every_check(tmp_path, monkeypatch):
    from zaya_plugin.machines import check_process as module

    monkeypatch.setattr(module, "READY_S", 0.01)
    stuck = CheckProcess("cpu", tmp_path, Path("."))
    assert [stuck.run(row("good", argument="x")).state for _ in range(4)] == ["wrong", "wrong", "skipped", "skipped"]


def test_variables_of_a_launcher_are_left_out():
    given = {"RANK": "3", "SLURM_PROCID": "3", "MASTER_ADDR": "a", "PATH": "/bin", "HIP_VISIBLE_DEVICES": "0"}
    assert environment(given, "auto") == {"PATH": "/bin", "HIP_VISIBLE_DEVICES": "0"}
    assert environment(given, "cpu") == {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
