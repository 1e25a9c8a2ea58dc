# SPDX-License-Identifier: Apache-2.0
"""Steps as the heartbeats of all ranks tell them: slow ranks, stages, and checkpoints that were loaded."""

import time

from tests.aegis.journals import lines
from tests.aegis.lone_decider import peer_of, rows
from zaya_plugin.aegis.diagnose.cluster import Cluster
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.aegis.journal import read
from zaya_plugin.aegis.protocol import Beat
from zaya_plugin.aegis.run_record import slow_ranks


def beat(decider, node, step, busy):
    ranks = {("n1", "n2").index(node): {"phase": "train", "step": step, "step_seconds": 0.2, "busy_seconds": busy}}
    decider.on_beat(peer_of(decider, node), Beat(1, 0.0, ranks))


def test_a_slow_rank_is_detected_among_nodes_of_one_rank_each(decider, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for number in range(6):
        now[0] += 2.0
        beat(decider, "n1", 4 * number, 0.1)
        beat(decider, "n2", 4 * number, 0.5)
    (said,) = rows(decider, "diagnosis")
    assert (said["cause"], said["node"], said["rank"]) == ("slow_rank", "n2", 1)
    assert said["evidence"][0]["values"] == {"factor": 5.0, "busy_seconds": 0.5}
    assert [row["action"] for row in rows(decider, "decision")] == ["watch"] and decider.cluster.running


def test_a_rank_that_is_slow_now_and_then_or_for_few_steps_is_not_named(decider, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    for number in range(12):
        now[0] += 2.0
        beat(decider, "n1", 4 * number, 0.1)
        beat(decider, "n2", 4 * number, 0.5 if number % 3 else 0.1)
    beat(decider, "n2", 47, 0.1)
    for number in range(5):  # from the first slow one 4 steps more
        now[0] += 20.0
        beat(decider, "n2", 48 + number, 0.5)
    assert rows(decider, "diagnosis") == []
    now[0] += 20.0
    beat(decider, "n2", 53, 0.5)
    assert [row["cause"] for row in rows(decider, "diagnosis")] == ["slow_rank"]


def test_the_factor_of_a_slow_rank_is_against_the_median_of_the_others():
    assert slow_ranks({0: 0.5, 1: 0.5, 2: 0.55, 3: 2.5}) == {3: 5.0}
    assert slow_ranks({0: 1.0, 1: 1.4}) == {} and slow_ranks({0: 1.0}) == {} and slow_ranks({}) == {}


def stage_beats(decider, stage, step, seconds=0.2, phase="train", nodes=("n1", "n2")):
    for node in nodes:
        rank = ("n1", "n2").index(node)
        ranks = {rank: {"phase": phase, "step": step, "step_seconds": seconds, "stage": stage}}
        decider.on_beat(peer_of(decider, node), Beat(decider.cluster.generation, 0.0, ranks))


def fail(decider):
    decider.begin_diagnosis(Evidence(time.time(), "n1", "exit", "ended", 0, "segfault", {"exit_code": -11}))
    decider.observations.evidence.append(decider.observations.symptom)
    decider.decide(
        decider.observations.symptom, alive=False, result=decider.observations.diagnose(decider.steps.stepped)
    )
    action = rows(decider, "decision")[-1]["action"]
    if action == "restart":
        decider.attempt.start(29500)
    return action


def test_the_stages_of_a_curriculum_are_distinguished_by_their_names(decider):
    decider.cluster.stages = True
    stage_beats(decider, "one", 0, None, "warm_up")
    stage_beats(decider, "one", 1)
    stage_beats(decider, "one", 60)
    stage_beats(decider, "two", 1, nodes=("n1",))  # the other node reports a moment later
    stage_beats(decider, "two", 0, None, "warm_up", nodes=("n2",))
    stage_beats(decider, "two", 0, None, "warm_up", nodes=("n1",))
    stage_beats(decider, "two", 2)
    found = [
        (row["kind"], row["stage"], row["step"], row.get("after"))
        for row in lines(decider.settings.journal)
        if row["kind"] in ("first_step", "progress")
    ]
    assert ("first_step", "one", 1, 0) == found[0] and found[-2:] == [
        ("progress", "one", 60, None),
        ("progress", "two", 2, 0),
    ]


def test_a_later_stage_that_fails_at_a_step_that_an_earlier_one_has_made_is_not_stopped(decider):
    """The attempt ends before the first step of the stage: the next one begins with it."""
    decider.cluster.stages = True
    stage_beats(decider, "one", 1)
    stage_beats(decider, "one", 60)
    assert fail(decider) == "restart"
    for step in (5, 15, 25):
        stage_beats(decider, "two", 0, None, "warm_up")
        stage_beats(decider, "two", step)
        assert fail(decider) == "restart"
    again = Cluster(stages=True).replay(read(decider.settings.journal))
    assert (again.stage, again.stage_name, again.best) == (1, "two", 25)


def test_ranks_that_have_loaded_a_checkpoint_have_made_no_step(decider):
    """Of a command whose checkpoints are not known: the ranks tell from which step on they continue."""
    stage_beats(decider, None, 10, None, "warm_up")
    assert rows(decider, "first_step") == [] and decider.cluster.step is None
    stage_beats(decider, None, 11)
    assert [(row["step"], row["after"]) for row in rows(decider, "first_step")] == [(11, 10)]
