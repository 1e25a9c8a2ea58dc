# SPDX-License-Identifier: Apache-2.0
"""The start of ranks: what a wait for others says, and that signals end it at once. Each rank is a fork of the test."""

import datetime
import functools
import os
import signal
import socket
import sys
import time
import traceback
import types

import pytest
import torch

from zaya_plugin.ground.errors import RunEndedError
from zaya_plugin.hosts import start_waits
from zaya_plugin.hosts.start_waits import Start

SECONDS = 120  # of a slow machine


@pytest.fixture
def ranks(tmp_path):
    """Starts ranks: ranks(number, world, work) -> its process id; what it says is in rank<number>."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    started = []

    def start(number, world, work):
        if pid := os.fork():
            started.append(pid)
            return pid
        code = 1
        try:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(number), WORLD_SIZE=str(world))
            os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
            torch.distributed.GroupMember.WORLD = None  # of a test before, in the process that was forked
            sys.stderr = open(tmp_path / f"rank{number}", "w")
            start_waits.SAY_SECONDS, start_waits.LOOK_SECONDS = 0.3, 0.2
            work(Start(number, world, sys.stderr))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    start.port = port
    yield start
    for pid in started:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def said(path, text):
    deadline = time.monotonic() + SECONDS
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.02)


def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def join(start):
    start.join(SECONDS)


def join_and_meet(start, late):
    """Rank 0 waits for rank 1 in a collective."""
    join(start)
    limit = datetime.timedelta(seconds=SECONDS)
    torch.distributed.init_process_group("gloo", rank=start.rank, world_size=start.world_size, timeout=limit)
    if start.rank == 1:
        late()
    torch.distributed.barrier()


def read_slowly():
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize(
    "number, sent, code", [(0, signal.SIGUSR1, -signal.SIGTERM), (1, signal.SIGTERM, -15), (1, signal.SIGINT, -2)]
)
def test_a_rank_without_the_others_says_for_whom_it_waits_and_a_signal_ends_it(ranks, tmp_path, number, sent, code):
    pid = ranks(number, 3, join)
    whom = (
        "zaya: waits for ranks 1, 2, of 3"
        if number == 0
        else f"rank 1: waits for rank 0 at 127.0.0.1:{ranks.port}, of 3"
    )
    said(tmp_path / f"rank{number}", whom)
    os.kill(pid, sent)
    assert ended(pid) == code
    text = (tmp_path / f"rank{number}").read_text()
    assert f"{sent.name}: the start ends, before its first step" in text and "Traceback" not in text


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("late, where", [(read_slowly, "read_slowly"), (stop, "")])
def test_a_rank_that_waits_in_a_collective_names_the_rank_that_does_not_come(ranks, tmp_path, late, where):
    first, _ = (ranks(number, 2, functools.partial(join_and_meet, late=late)) for number in (0, 1))
    said(tmp_path / "rank0", f"zaya: waits for rank 1 on {socket.gethostname()}, which was last seen in {where}")
    os.kill(first, signal.SIGUSR2)
    assert ended(first) == -signal.SIGTERM


def test_ranks_that_do_not_come_in_time_are_named(monkeypatch, ranks):
    with pytest.raises(RunEndedError, match=r"^WORLD_SIZE=3: rank 2 did not start within 10 minutes\. Fix: start all"):
        start = Start.__new__(Start)
        start.world_size, start.store = 3, types.SimpleNamespace(check=lambda ranks: ranks != ["2"])
        start._wait(600, time.monotonic() - 1, 0.0)


def test_after_the_start_a_signal_is_left_to_the_loop(ranks, tmp_path):
    def work(start):
        received = []
        signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))  # as Megatron does
        start_waits.over()
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU, signal.SIGINT, signal.SIGTERM):
            os.kill(os.getpid(), number)
            time.sleep(0)
        assert received == 5 * [signal.SIGTERM]

    assert ended(ranks(0, 1, work)) == 0, (tmp_path / "rank0").read_text()
