# SPDX-License-Identifier: Apache-2.0
"""The rank that did not arrive: from recorded dumps, and from two real ranks over gloo."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from zaya_plugin.aegis.collectors.rank_files import FlightRecorder, Guards, read_beats, summary
from zaya_plugin.aegis.diagnose.diagnosis import missing_ranks
from zaya_plugin.ground.errors import STACKS_SIGNAL


def dump(rank, *entries, request="1"):
    """A dump of torch; entries: (group, number), in order."""
    rows = [
        {
            "collective_seq_id": number,
            "is_p2p": group == "p2p",
            "process_group": [group, f"{group}_GROUP"],
            "profiling_name": "nccl:all_reduce",
            "time_created_ns": at,
        }
        for at, (group, number) in enumerate(entries)
    ]
    return {"rank": rank, "request": request, "version": "2.10", "entries": rows}


def waiting_for(*dumps, world=()):
    return missing_ranks({each["rank"]: summary(each) for each in dumps}, world)


def test_the_rank_with_the_lowest_number_did_not_arrive():
    ranks, text = waiting_for(dump(0, ("dp", 3), ("dp", 4)), dump(1, ("dp", 3)), dump(2, ("dp", 4)))
    assert ranks == [1]
    assert text == "rank 1 enqueued collective 3 of group dp:dp_GROUP last, and others 4"


def test_a_rank_that_waits_in_another_group_is_a_victim():
    """Ranks 0, 1 share a tensor group, and so do 2, 3; 0, 2 and 1, 3 the data groups. Rank 3 stopped, so rank 2 waits in
    the tensor group and never comes to the data group, where rank 0 waits; 1 waits for 3.
    """
    dumps = [
        dump(0, ("tp a", 7), ("dp a", 5)),
        dump(1, ("tp a", 7), ("dp b", 5)),
        dump(2, ("dp a", 4), ("tp b", 7)),
        dump(3, ("dp b", 4), ("tp b", 6)),
    ]
    assert waiting_for(*dumps)[0] == [3]


def test_without_a_difference_nobody_is_named():
    assert waiting_for(dump(0, ("dp", 4)), dump(1, ("dp", 4))) == ([], "all ranks have enqueued the same collectives")
    assert waiting_for(dump(0), dump(1)) == ([], "all ranks have enqueued the same collectives")
    assert waiting_for(world=range(4))[0] == []  # no dump at all says nothing about one rank


def test_messages_between_stages_have_no_number_of_the_group():
    assert waiting_for(dump(0, ("dp", 4), ("p2p", 90)), dump(1, ("dp", 4), ("p2p", 20)))[0] == []


def test_a_rank_without_a_dump_is_named_before_all_others():
    ranks, text = waiting_for(dump(0, ("dp", 4)), dump(1, ("dp", 3)), dump(3, ("dp", 4)), world=range(4))
    assert ranks == [2] and text == "rank 2 wrote no dump, and 3 other(s) did"


def test_each_dump_is_reported_once_a_request(tmp_path):
    recorder = FlightRecorder("n1", tmp_path)
    recorder.ask()
    assert (tmp_path / "request").read_text() == "1"
    (tmp_path / "rank0.flight.json").write_text(json.dumps(dump(0, ("dp", 3))))
    (tmp_path / "rank1.flight.json").write_text('{"rank": 1, "request": "1", "error": "no recorder"}')
    (tmp_path / "rank2.flight.json").write_text("[1")
    first, second = recorder.poll(1.0)
    assert (first.rule, first.rank, first.values["enqueued"]) == ("flight_record", 0, {"dp:dp_GROUP": 3})
    assert first.text == "rank 0 has enqueued all_reduce 3 of dp:dp_GROUP last" and second.text == "no collective"
    assert recorder.poll(2.0) == []
    recorder.ask()
    assert (tmp_path / "request").read_text() == "2"
    (tmp_path / "rank0.flight.json").write_text(json.dumps(dump(0, ("dp", 3), request="2")))
    assert [e.values["request"] for e in recorder.poll(3.0)] == ["2"]


def test_guard_files(tmp_path):
    guards = Guards("n1", tmp_path)
    assert guards.poll(1.0) == []
    values = {"kind": "loss_spike", "rank": 1, "time": 5.0, "text": "loss 9", "first_step": 40, "rule": "x", "at": 1}
    (tmp_path / "rank1.guard.json").write_text(json.dumps(values))
    (tmp_path / "rank2.guard.json").write_text("{}")
    (found,) = guards.poll(1.0)
    assert (found.rule, found.rank, found.time, found.source) == ("loss_spike", 1, 5.0, "rank")
    assert found.values == {"first_step": 40, "rule": "x", "at": 1} and guards.poll(2.0) == []


RANK = """
import datetime, os, sys, time
from zaya_plugin.training import heartbeat
rank = int(sys.argv[1])
heartbeat.start(rank)
heartbeat.stage('\u00e9' * 100 + '\"long_context_2')
import torch
import torch.distributed as dist
store = dist.FileStore(sys.argv[2], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=600))
heartbeat.phase("warm_up")
for step in range(1, 4):
    dist.all_reduce(torch.ones(1))
    heartbeat.step(step, 0.1, 0.05, float("nan"), warm=step > 1)
if rank == 1:
    time.sleep(600)  # does not arrive
dist.all_reduce(torch.ones(1))
"""


@pytest.fixture
def hanging_ranks(tmp_path):
    folder = tmp_path / "aegis"
    folder.mkdir(mode=0o700)
    environment = {**os.environ, "ZAYA_AEGIS_DIR": str(folder), "TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store")], env=environment, stderr=subprocess.DEVNULL)
        for rank in range(2)
    ]
    wait(lambda: [beat["step"] for beat in read_beats(folder).values()] == [3, 3])
    yield folder, ranks
    for rank in ranks:
        rank.kill()
        rank.wait()


def wait(holds, seconds=250):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow  # both import torch
def test_two_real_ranks_of_which_one_does_not_arrive(hanging_ranks):
    folder, ranks = hanging_ranks
    beats = read_beats(folder)
    assert [beats[rank]["pid"] for rank in (0, 1)] == [rank.pid for rank in ranks]
    assert {beat["phase"] for beat in beats.values()} == {"train"} and beats[0]["loss"] == "nan"
    assert beats[0]["stage"] == "?" * 17 + '"long_context_2'
    assert all((folder / f"rank{rank}.json").stat().st_size == 256 for rank in (0, 1))
    recorder, found = FlightRecorder("n1", folder), {}

    def dumped():
        found.update({each.rank: each.values for each in recorder.poll(1.0)})
        if {values["request"] for values in found.values()} == {(folder / "request").read_text()} and len(found) == 2:
            if found[0]["enqueued"]["0:default_pg"] == 4:  # rank 0 has entered its last collective
                return True
            recorder.ask()
        return False

    recorder.ask()
    wait(dumped)
    assert missing_ranks(found, world=(0, 1)) == (
        [1],
        "rank 1 enqueued collective 3 of group 0:default_pg last, and others 4",
    )
    for rank in ranks:
        os.kill(rank.pid, STACKS_SIGNAL)
    stacks = [folder / f"rank{rank}.stacks" for rank in (0, 1)]
    wait(lambda: all("most recent call first" in path.read_text() for path in stacks))
    assert "all_reduce" in stacks[0].read_text() and "all_reduce" not in stacks[1].read_text()
    assert [rank.poll() for rank in ranks] == [None, None]

    os.kill(ranks[1].pid, signal.SIGSTOP)  # it cannot even answer
    (folder / "rank1.flight.json").unlink()
    found.clear()
    recorder.ask()
    wait(lambda: found.update({e.rank: e.values for e in recorder.poll(1.0)}) or found)
    time.sleep(0.5)
    recorder.poll(1.0)
    assert missing_ranks(found, world=(0, 1)) == ([1], "rank 1 wrote no dump, and 1 other(s) did")


def test_without_a_supervisor_nothing_is_written(tmp_path):
    code = (
        "import signal, threading; from zaya_plugin.training import heartbeat as h; h.start(0); h.phase('train'); "
        "h.step(1, 0.1); h.guard('loss_spike', 'x'); assert threading.active_count() == 1 and not h.is_on(); "
        "assert signal.getsignal(signal.SIGRTMIN + 5) == signal.SIG_DFL"
    )
    environment = {name: value for name, value in os.environ.items() if name != "ZAYA_AEGIS_DIR"}
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment | {"PYTHONPATH": os.getcwd()}, check=True
    )
    assert os.listdir(tmp_path) == []


def test_a_folder_that_is_gone_does_not_end_the_rank(tmp_path):
    code = "from zaya_plugin.training import heartbeat as h; h.start(0); h.step(1, 0.1); assert not h.is_on()"
    environment = {**os.environ, "ZAYA_AEGIS_DIR": str(tmp_path / "gone")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
