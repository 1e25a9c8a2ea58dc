# SPDX-License-Identifier: Apache-2.0
"""The decision maker without processes: its peers are made here, and say what a test lets them say."""

import dataclasses
import time

import pytest

from zaya_plugin.aegis import decider, slurm
from zaya_plugin.aegis.cluster import Cluster
from zaya_plugin.aegis.decide import Decision
from zaya_plugin.aegis.decider import Decider, Peer, resumed
from zaya_plugin.aegis.evidence import Evidence
from zaya_plugin.aegis.journal import read
from zaya_plugin.aegis.settings import Settings

COMMAND = ("zaya", "train", "experiment=cpu_demo", "resume=never", "data.skip_steps=[5]")


class Wire:
    """The connection of a peer."""

    def __init__(self):
        self.sent = []

    def send(self, body):
        self.sent.append(body)


@pytest.fixture
def maker(tmp_path, monkeypatch):
    """Two nodes of a rank each that train, and a spare."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    settings = Settings(COMMAND, "rank", "n1", 2, 1, (2,), 1, tmp_path, "h", 1, skip_steps=("5",))
    made = Decider(settings, b"s" * 32, None)
    for number, node in enumerate(("n1", "n2", "n3")):
        peer = made.peers[node] = Peer(Wire())
        peer.node, peer.address, peer.running = node, f"10.0.0.{number}", {number}
        made.links.add(peer.link)
    made.order = ("n1", "n2")
    made.start(29500)
    made.peers["n3"].running = set()
    made.in_run()
    yield made
    made.journal.close()


def rows(maker, kind):
    return [row for row in read(maker.settings.journal) if row["kind"] == kind]


def beat(maker, node, step, busy):
    ranks = {("n1", "n2").index(node): {"phase": "train", "step": step, "step_seconds": 0.2, "busy_seconds": busy}}
    maker.on_beat(maker.peers[node], {"time": 0.0, "generation": 1, "ranks": ranks})


def test_a_slow_rank_is_found_among_nodes_of_one_rank_each(maker, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for number in range(6):
        now[0] += 2.0
        beat(maker, "n1", 4 * number, 0.1)
        beat(maker, "n2", 4 * number, 0.5)
    (said,) = rows(maker, "diagnosis")
    assert (said["cause"], said["node"], said["rank"]) == ("slow_rank", "n2", 1)
    assert said["evidence"][0]["values"] == {"factor": 5.0, "busy_seconds": 0.5}
    assert [row["action"] for row in rows(maker, "decision")] == ["watch"] and maker.cluster.running


def test_a_rank_that_is_slow_now_and_then_or_for_few_steps_is_not_named(maker, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for number in range(12):
        now[0] += 2.0
        beat(maker, "n1", 4 * number, 0.1)
        beat(maker, "n2", 4 * number, 0.5 if number % 3 else 0.1)
    beat(maker, "n2", 47, 0.1)
    for number in range(5):  # from the first slow one 4 steps more
        now[0] += 20.0
        beat(maker, "n2", 48 + number, 0.5)
    assert rows(maker, "diagnosis") == []
    now[0] += 20.0
    beat(maker, "n2", 53, 0.5)
    assert [row["cause"] for row in rows(maker, "diagnosis")] == ["slow_rank"]


@pytest.mark.parametrize("others, action", [((), ["exchange"]), (("n1",), []), (("n3",), [])])
def test_a_disk_that_fails_on_one_node_alone_is_exchanged_and_a_file_server_is_not(maker, others, action):
    for node in ("n2", *others):
        maker.see(Evidence(time.time() - decider.PROBE_SECONDS, node, "storage", "Input/output error", rule="eio"), 1)
    assert [row["evidence"]["node"] for row in rows(maker, "symptom")][:1] == ["n2"]
    maker.in_run()
    if maker.phase == "settle":
        maker.since -= decider.SETTLE_SECONDS + decider.EXPLAIN_SECONDS
        maker.in_settle()
    assert [row["action"] for row in rows(maker, "decision")] == action


@pytest.mark.parametrize("old", [0.0, 1400.0, 90_000.0])
def test_sure_evidence_is_the_cause_whatever_its_clock_says(maker, old):
    """Kernel lines have the time since the boot; a clock that is set, or a recorded line, makes them look old."""
    maker.see(Evidence(time.time() - old, "n2", "kernel", "uncorrectable hardware error", rule="ras_ue"), 1)
    maker.since -= decider.SETTLE_SECONDS + decider.EXPLAIN_SECONDS
    maker.in_settle()
    assert [(row["cause"], row["node"]) for row in rows(maker, "diagnosis")] == [("ras_ue", "n2")]
    assert [row["action"] for row in rows(maker, "decision")] == ["exchange"]


def test_an_alert_speaks_amds_code_of_the_cause(maker, monkeypatch):
    told = []
    monkeypatch.setattr(maker.alerts, "send", lambda text, level, **facts: told.append(facts))
    maker.look(Evidence(time.time(), "n2", "kernel", "uncorrectable hardware error", rule="ras_ue"))
    maker.judge(maker.symptom, alive=False)
    assert (told[0]["cause"], told[0]["safe_code"]) == ("ras_ue", "008")


def test_an_agent_that_was_killed_while_its_ranks_are_ended_is_told_again(maker):
    maker.judge(Evidence(time.time(), "n1", "exit", "ended", 0, None, {"exit_code": 1}), alive=False)
    assert maker.phase == "stop" and maker.stopping == {"n1", "n2"}
    link = Wire()
    maker.links.add(link)
    new = {"node": "n2", "address": "10.0.0.1", "pid": 7, "generation": 0, "running": [], "codes": {}, "over": None}
    maker.peers["n2"].pid = 6
    maker.links.discard(maker.peers["n2"].link)  # its connection has ended with it
    maker.joined(link, {"kind": "join", **new, "asked": []})
    assert [(each["kind"], each["generation"]) for each in link.sent] == [("stop", 1)]
    for node in ("n1", "n2"):
        maker.on_ended(maker.peers[node], {"generation": 1, "survivors": []})
    maker.in_stop()
    assert maker.phase == "delay" and maker.cluster.out == {}


def test_a_node_with_broken_hardware_does_not_come_back_with_the_end_of_its_processes(maker):
    maker.leave_out("n2", "ras_ue", broken=True)
    maker.on_free(maker.peers["n2"], {})
    maker.leave_out("n1", "unkillable", broken=False)
    maker.on_free(maker.peers["n1"], {})
    assert maker.cluster.out == {"n2": "ras_ue"}


def test_a_decision_maker_killed_right_after_a_decision_knows_which_node_it_left_out(maker):
    maker.note("diagnosis", cause="ras_ue", node="n2", rank=None, fingerprint="ras_ue on n2")
    maker.note("decision", **Decision("exchange", "broken", ("n2",)).to_json())
    again = Decider(maker.settings, b"s" * 32, None)
    assert again.cluster.out == {"n2": "ras_ue"}
    again.journal.close()


def test_heartbeats_that_arrive_while_the_decision_maker_is_held_count(maker, monkeypatch):
    """As by a file server that does not answer a write of the journal."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(maker, "exchange_messages", lambda timeout: None)
    monkeypatch.setattr(maker.alerts, "poll", lambda: now.__setitem__(0, now[0] + 60.0) or [])
    for peer in maker.peers.values():
        peer.beat = 99.0
    maker.tick()
    assert len(maker.peers) == 3 and not rows(maker, "symptom")


def test_the_time_of_an_exit_is_that_of_this_clock(maker):
    at = time.time()
    maker.on_exit(maker.peers["n2"], {"generation": 1, "rank": 1, "code": -9, "time": at - 3600, "offset": 3600.0})
    assert [row["evidence"]["time"] for row in rows(maker, "symptom")] == [at]


def test_too_few_nodes_after_a_failure_are_a_requeue_where_that_is_asked_for(maker, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    asked = []
    monkeypatch.setattr(slurm, "requeue", lambda job, out: asked.append(job) or (True, ""))
    maker.settings = dataclasses.replace(maker.settings, requeue=True)
    del maker.peers["n2"], maker.peers["n3"]
    maker.patience = decider.REJOIN_SECONDS
    maker.to("wait")
    maker.in_wait()
    assert not asked
    maker.since -= decider.REJOIN_SECONDS + 1
    maker.in_wait()
    assert asked == ["7"] and maker.code == 0
    assert [row["action"] for row in rows(maker, "decision")] == ["requeue"]


def test_a_run_that_hangs_until_it_is_given_up_ends_with_the_code_of_a_hang(maker):
    assert maker.failed_code() == 1
    maker.note("diagnosis", cause="hang", node="n2", rank=1, fingerprint="hang of rank 1")
    maker.note("decision", **Decision("stop", "hangs").to_json())
    assert maker.failed_code() == 100


def test_a_disk_that_fails_changes_nothing_where_no_spare_is_left(maker):
    del maker.peers["n3"]
    maker.see(Evidence(time.time() - decider.PROBE_SECONDS, "n2", "storage", "Input/output error", rule="eio"), 1)
    maker.in_run()
    assert maker.phase == "run" and rows(maker, "decision") == []


def test_the_data_of_a_roll_back_are_left_out_by_the_next_attempt_and_by_all_later_ones(maker):
    values = {"step": 23, "first_step": 20, "skip": [20, 23]}
    spike = Evidence(time.time(), "n2", "rank", "spiked", 1, "loss_spike", values)
    maker.cluster.checkpoints = [8, 16]
    maker.look(spike)
    maker.evidence.append(spike)
    maker.judge(spike, alive=False)
    assert [(row["action"], row["to_step"], row["skip"]) for row in rows(maker, "decision")] == [
        ("rollback", 16, [20, 23])
    ]
    maker.start(29501)
    command = maker.peers["n1"].link.sent[-1]["command"]
    assert command == ["zaya", "train", "experiment=cpu_demo", "resume=auto", "data.skip_steps=[5,20-23]"]
    again = Decider(maker.settings, b"s" * 32, None)  # after its own crash
    assert again.cluster.skips == [(20, 23)]
    again.journal.close()


def test_a_command_without_a_roll_back_keeps_its_own_steps_and_another_program_its_words(maker):
    assert resumed(maker.settings) == ["zaya", "train", "experiment=cpu_demo", "data.skip_steps=[5]", "resume=auto"]
    other = dataclasses.replace(maker.settings, command=("torchrun", "x.py"))
    assert resumed(other, [(1, 2)]) == ["torchrun", "x.py"]


def test_a_spike_that_comes_again_goes_back_further(maker):
    values = {"step": 23, "first_step": 20}
    for port in (29501, 29502):
        spike = Evidence(time.time(), "n2", "rank", "spiked", 1, "loss_spike", values)
        maker.cluster.checkpoints = [8, 16]
        maker.look(spike)
        maker.evidence.append(spike)
        maker.judge(spike, alive=False, said=maker.diagnose())
        maker.start(port)
    assert [row["to_step"] for row in rows(maker, "decision")] == [16, 8]


@pytest.mark.parametrize("count, pending", [(None, True), ("0", True), ("1", False)])
def test_a_requeue_is_carried_out_once(maker, monkeypatch, count, pending):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    said = Decision("requeue", "too few nodes", ("n2",)).to_json()
    maker.note("diagnosis", cause="node_lost", node="n2", rank=None, fingerprint="node_lost on n2")
    maker.note("decision", **said, start=slurm.start_of_job())
    if count is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    again = Decider(maker.settings, b"s" * 32, None)
    assert (again.cluster.pending is not None) is pending
    assert again.phase == ("adopt" if pending else "wait")
    again.journal.close()


def stage_beats(maker, stage, step, seconds=0.2, phase="train", nodes=("n1", "n2")):
    for node in nodes:
        rank = ("n1", "n2").index(node)
        ranks = {rank: {"phase": phase, "step": step, "step_seconds": seconds, "stage": stage}}
        maker.on_beat(maker.peers[node], {"time": 0.0, "generation": maker.cluster.generation, "ranks": ranks})


def fail(maker):
    maker.look(Evidence(time.time(), "n1", "exit", "ended", 0, "segfault", {"exit_code": -11}))
    maker.evidence.append(maker.symptom)
    maker.judge(maker.symptom, alive=False, said=maker.diagnose())
    action = rows(maker, "decision")[-1]["action"]
    if action == "restart":
        maker.start(29500)
    return action


def test_the_stages_of_a_curriculum_are_told_by_their_names(maker):
    maker.cluster.stages = True
    stage_beats(maker, "one", 0, None, "warm_up")
    stage_beats(maker, "one", 1)
    stage_beats(maker, "one", 60)
    stage_beats(maker, "two", 1, nodes=("n1",))  # the other node is told a moment later
    stage_beats(maker, "two", 0, None, "warm_up", nodes=("n2",))
    stage_beats(maker, "two", 0, None, "warm_up", nodes=("n1",))
    stage_beats(maker, "two", 2)
    found = [
        (row["kind"], row["stage"], row["step"], row.get("after"))
        for row in read(maker.settings.journal)
        if row["kind"] in ("first_step", "progress")
    ]
    assert ("first_step", "one", 1, 0) == found[0] and found[-2:] == [
        ("progress", "one", 60, None),
        ("progress", "two", 2, 0),
    ]


def test_a_later_stage_that_fails_at_a_step_that_an_earlier_one_has_made_is_not_stopped(maker):
    """The attempt ends before the first step of the stage: the next one begins with it."""
    maker.cluster.stages = True
    stage_beats(maker, "one", 1)
    stage_beats(maker, "one", 60)
    assert fail(maker) == "restart"
    for step in (5, 15, 25):
        stage_beats(maker, "two", 0, None, "warm_up")
        stage_beats(maker, "two", step)
        assert fail(maker) == "restart"
    again = Cluster(2, stages=True).replay(read(maker.settings.journal))
    assert (again.stage, again.stage_name, again.best) == (1, "two", 25)


def test_ranks_that_have_loaded_a_checkpoint_have_made_no_step(maker):
    """Of a command whose checkpoints are not known: the ranks tell from which step on they continue."""
    stage_beats(maker, None, 10, None, "warm_up")
    assert rows(maker, "first_step") == [] and maker.cluster.step is None
    stage_beats(maker, None, 11)
    assert [(row["step"], row["after"]) for row in rows(maker, "first_step")] == [(11, 10)]
