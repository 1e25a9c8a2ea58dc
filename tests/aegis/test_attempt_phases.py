# SPDX-License-Identifier: Apache-2.0
"""What is done to nodes after a decision: ends, starts, nodes that are left out or come back, and requeues."""

import dataclasses
import sys
import time

import pytest

from tests.aegis.lone_decider import Wire, peer_of, rows
from zaya_plugin.aegis import slurm
from zaya_plugin.aegis.attempt_phases import REJOIN_SECONDS, Phase
from zaya_plugin.aegis.decider import Decider
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.aegis.journal import Journal
from zaya_plugin.aegis.protocol import Begin, Decision, Diagnosis, Ended, Join, Stop, SurvivorsEnded
from zaya_plugin.aegis.settings import is_train, resumed
from zaya_plugin.commands.aegis_run import run as parser
from zaya_plugin.commands.aegis_run import settings_of


def test_an_agent_that_was_killed_while_its_ranks_are_ended_gets_the_message_again(decider):
    decider.decide(Evidence(time.time(), "n1", "exit", "ended", 0, None, {"exit_code": 1}), alive=False)
    assert decider.clock.phase is Phase.STOP and decider.attempt.stopping == {"n1", "n2"}
    link = Wire()
    decider.peers.by_link[link] = None
    peer_of(decider, "n2").pid = 6
    del decider.peers.by_link[peer_of(decider, "n2").link]  # its connection has ended with it
    decider.on_join(link, Join(0, "n2", "10.0.0.1", 7, [], {}))
    assert link.sent == [Stop(1, 0.0)]
    for node in ("n1", "n2"):
        decider.on_ended(peer_of(decider, node), Ended(1, []))
    decider.attempt.wait_for_ends()
    assert decider.clock.phase is Phase.DELAY and decider.cluster.out == {}


def test_a_node_with_broken_hardware_does_not_come_back_with_the_end_of_its_processes(decider):
    decider.attempt.leave_out("n2", "ras_ue", broken=True)
    decider.on_survivors_ended(peer_of(decider, "n2"), SurvivorsEnded(1))
    decider.attempt.leave_out("n1", "unkillable", broken=False)
    decider.on_survivors_ended(peer_of(decider, "n1"), SurvivorsEnded(1))
    assert decider.cluster.out == {"n2": "ras_ue"}


def test_too_few_nodes_after_a_failure_are_a_requeue_where_that_is_asked_for(decider, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    asked = []
    monkeypatch.setattr(slurm, "requeue", lambda job, out: asked.append(job) or (True, ""))
    decider.attempt.settings = dataclasses.replace(decider.settings, requeue=True)
    del decider.peers.by_node["n2"], decider.peers.by_node["n3"]
    decider.attempt.patience = REJOIN_SECONDS
    decider.clock.enter(Phase.WAIT)
    decider.attempt.wait_for_nodes()
    assert not asked
    decider.clock.since -= REJOIN_SECONDS + 1
    decider.attempt.wait_for_nodes()
    assert asked == ["7"] and decider.code == 0
    assert [row["action"] for row in rows(decider, "decision")] == ["requeue"]


def test_the_data_of_a_roll_back_are_left_out_by_the_next_attempt_and_by_all_later_ones(decider):
    values = {"step": 23, "first_step": 20, "skip": [20, 23]}
    spike = Evidence(time.time(), "n2", "rank", "spiked", 1, "loss_spike", values)
    decider.cluster.checkpoints = [8, 16]
    decider.begin_diagnosis(spike)
    decider.observations.evidence.append(spike)
    decider.decide(spike, alive=False)
    assert [(row["action"], row["to_step"], row["skip"]) for row in rows(decider, "decision")] == [
        ("rollback", 16, [20, 23])
    ]
    decider.attempt.start(29501)
    command = peer_of(decider, "n1").link.sent[-1].command
    assert command == ["zaya", "train", "experiment=cpu_demo", "resume=auto", "data.skip_steps=[5,20-23]"]
    again = Decider(decider.settings, b"s" * 32, None)  # after its own crash
    assert again.cluster.skips == [(20, 23)]
    again.record.journal.close()


def test_a_command_without_a_roll_back_keeps_its_own_steps_and_another_program_its_words(decider):
    assert resumed(decider.settings) == ["zaya", "train", "experiment=cpu_demo", "data.skip_steps=[5]", "resume=auto"]
    other = dataclasses.replace(decider.settings, command=("torchrun", "x.py"))
    assert resumed(other, [(1, 2)]) == ["torchrun", "x.py"]
    words = ("zaya", "curriculum", "--only", "demo_2", "experiment=cpu_demo")
    stage = dataclasses.replace(decider.settings, command=words)
    assert resumed(stage) == list(words)
    assert resumed(stage, [(7, 8)]) == [*words, "demo_2:data.skip_steps=[5,7-8]"]


def settings_for(words):
    return settings_of(parser().read(words), {})


def test_a_stage_of_a_curriculum_is_supervised_as_a_training(tmp_path):
    words = ("experiment=cpu_demo", "nproc=2", f"run_dir={tmp_path}", "demo_2:data.skip_steps=[3]")
    settings = settings_for(["--node", "n1", "--", "zaya", "curriculum", "--only=demo_2", *words])
    assert settings.start_per == "rank" and settings.ranks_per_node == 2 and settings.skip_steps == ("3",)
    assert settings.journal == tmp_path / "demo_2" / "aegis" / "journal.jsonl"
    assert settings.checkpoints == tmp_path / "demo_2" / "checkpoints"
    with pytest.raises(ValueError, match="--only=demo_9: no such stage. Allowed: demo_1, demo_2, demo_3"):
        settings_for(["--", "zaya", "curriculum", "--only", "demo_9", *words])


def test_the_word_after_zaya_decides_what_is_a_training():
    module = ("python3", "-m", "zaya_plugin.cli")
    train, stage = ("train", "experiment=cpu_demo"), ("curriculum", "--only", "demo_2")
    others = [("data", "prepare", "--output", "train"), ("eval", "runs/x", "--data", "train"), ("curriculum",), ()]
    others.append(("data", "prepare", "--output", "curriculum", "--only", "train"))
    for program in (("zaya",), ("/usr/bin/zaya",), module):
        assert is_train((*program, *train)) and is_train((*program, *stage))
        assert not any(is_train((*program, *words)) for words in others)
    assert not is_train(("python3", "train.py", "train")) and not is_train(("primus-cli", "train", "zaya"))


@pytest.mark.parametrize("program", ["nosuchprogram", "{}", "{}/plain", "./zaya"])
def test_a_command_that_cannot_be_started_is_refused_before_the_start(tmp_path, program):
    (tmp_path / "plain").write_text("not executable")
    program = program.format(tmp_path)
    text = rf"^zaya aegis run -- COMMAND={program}: no such program .*Allowed: a program on PATH.*Fix: zaya aegis"
    with pytest.raises(ValueError, match=text):
        settings_for(["--", program, "--flag"])


def test_all_stages_of_a_curriculum_are_started_on_one_node(tmp_path):
    options = ["--decider", "n1:29400", "--output", str(tmp_path / "aegis"), "--ranks-per-node", "2", "--nodes"]
    for command in (["zaya", "curriculum", "experiment=cpu_demo"], [sys.executable, "train.py", "curriculum"]):
        settings = settings_for([*options, "1", "--spares", "1", "--", *command])
        assert settings.start_per == "node"
    assert settings_for([*options, "2", "--", *command]).nodes == 2
    with pytest.raises(ValueError, match="--nodes=2: `zaya curriculum` starts its stages on one node"):
        settings_for([*options, "2", "--", "zaya", "curriculum", "experiment=cpu_demo"])


def test_a_stage_has_a_journal_of_its_own_and_recipes_of_the_user(tmp_path):
    words = ("experiment=mine", "nproc=1", f"run_dir={tmp_path / 'run'}")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\ndefaults:\n  - cpu_demo\n  - _self_\n")
    for form in (["--config-dir", str(tmp_path)], [f"--config-dir={tmp_path}"], ["-cd", str(tmp_path)]):
        settings = settings_for(["--", "zaya", "train", *form, *words])
        assert settings.start_per == "rank" and settings.folder == tmp_path / "run" / "aegis"
    command = ("zaya", "curriculum", f"--config-dir={tmp_path}", *words)
    folder = tmp_path / "aegis"
    settings = settings_for(["--output", str(folder), "--", *command, "--only", "demo_1"])
    folder.mkdir()
    journal = Journal(folder / "journal.jsonl")
    journal.write(Begin(list(settings.command), 1, 0, 1), 0)
    journal.close()
    settings_for(["--output", str(folder), "--", *command, "--only", "demo_1"])
    with pytest.raises(ValueError, match=r"--output=.*aegis: its journal is of zaya curriculum .*--only demo_1"):
        settings_for(["--output", str(folder), "--", *command, "--only", "demo_2"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "cpu_demo"], "cpu_demo: is not key=value.* Fix: experiment=cpu_demo"),
        (["train", "--experiment", "cpu_demo"], "keys of recipes have no dashes.* Fix: experiment=cpu_demo"),
        (["train", "--config-dir", "nowhere", "experiment=mine"], "--config-dir=nowhere: no such directory"),
        (["train", "-cd=nowhere", "experiment=mine"], "--config-dir=nowhere: no such directory"),
        (["train", "experiment=cpu_demo", "optim.lr=1e-3,2e-3", "-m"], "several runs cannot be supervised"),
        (["curriculum", "--only", "demo_1", "cpu_demo"], "cpu_demo: is not key=value"),
        (["curriculum", "--only", "demo_1", "--steps", "3"], "--steps: no such option.* Fix: stage.train_iters=3"),
    ],
)
def test_a_supervised_command_line_is_read_as_zaya_train_reads_it(words, message):
    with pytest.raises(ValueError, match=message):
        settings_for(["--", "zaya", *words])


@pytest.mark.parametrize("count, pending", [(None, True), ("0", True), ("1", False)])
def test_a_requeue_is_carried_out_once(decider, monkeypatch, count, pending):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    decider.write(Diagnosis("node_lost", "n2", fingerprint="node_lost on n2"))
    decider.write(Decision("requeue", "too few nodes", ("n2",), start=slurm.start_of_job()))
    if count is not None:
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
    again = Decider(decider.settings, b"s" * 32, None)
    assert (again.cluster.pending is not None) is pending
    assert again.clock.phase is (Phase.ADOPT if pending else Phase.WAIT)
    again.record.journal.close()
