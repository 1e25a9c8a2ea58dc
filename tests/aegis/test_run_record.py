# SPDX-License-Identifier: Apache-2.0
"""Steps as the heartbeats of all ranks tell them: slow ranks, stages, and checkpoints that were loaded."""

import time

from tests.aegis.decision_maker import peer_of, rows
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.aegis.diagnose.policy import Cluster
from zaya_plugin.aegis.journal import read
from zaya_plugin.aegis.protocol import Beat
from zaya_plugin.aegis.run_record import slow_ranks


def beat(maker, node, step, busy):
    ranks = {("n1", "n2").index(node): {"phase": "train", "step": step, "step_seconds": 0.2, "busy_seconds": busy}}
    maker.on_beat(peer_of(maker, node), Beat(1, 0.0, ranks))


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


def test_the_factor_of_a_slow_rank_is_against_the_median_of_the_others():
    assert slow_ranks({0: 0.5, 1: 0.5, 2: 0.55, 3: 2.5}) == {3: 5.0}
    assert slow_ranks({0: 1.0, 1: 1.4}) == {} and slow_ranks({0: 1.0}) == {} and slow_ranks({}) == {}


def stage_beats(maker, stage, step, seconds=0.2, phase="train", nodes=("n1", "n2")):
    for node in nodes:
        rank = ("n1", "n2").index(node)
        ranks = {rank: {"phase": phase, "step": step, "step_seconds": seconds, "stage": stage}}
        maker.on_beat(peer_of(maker, node), Beat(maker.cluster.generation, 0.0, ranks))


def fail(maker):
    maker.begin_diagnosis(Evidence(time.time(), "n1", "exit", "ended", 0, "segfault", {"exit_code": -11}))
    maker.observations.evidence.append(maker.observations.symptom)
    maker.decide(maker.observations.symptom, alive=False, result=maker.observations.diagnose(maker.steps.stepped))
    action = rows(maker, "decision")[-1]["action"]
    if action == "restart":
        maker.attempt.start(29500)
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
    again = Cluster(stages=True).replay(read(maker.settings.journal))
    assert (again.stage, again.stage_name, again.best) == (1, "two", 25)


def test_ranks_that_have_loaded_a_checkpoint_have_made_no_step(maker):
    """Of a command whose checkpoints are not known: the ranks tell from which step on they continue."""
    stage_beats(maker, None, 10, None, "warm_up")
    assert rows(maker, "first_step") == [] and maker.cluster.step is None
    stage_beats(maker, None, 11)
    assert [(row["step"], row["after"]) for row in rows(maker, "first_step")] == [(11, 10)]
