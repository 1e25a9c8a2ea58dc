# SPDX-License-Identifier: Apache-2.0
"""What is done about a diagnosis, by the history of the run."""

from dataclasses import replace

import pytest

from zaya_plugin.aegis.diagnose.cluster import LONG_ATTEMPT_SECONDS, Cluster
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.aegis.diagnose.policy import decide
from zaya_plugin.aegis.diagnose.rules import Rules
from zaya_plugin.aegis.protocol import Diagnosis, row_of

RULES = Rules.load()
NODES = ("n1", "n2", "n3", "n4")


class Run:
    """A run of four nodes that train and some spares, as its journal tells it."""

    def __init__(self, spares=("n5",), sizes=(4,), **more):
        self.cluster = Cluster(sizes, restarts=10, **more)
        self.clock, self.spares = 1000.0, tuple(spares)
        self.apply("begin", command=["x"])
        self.start()

    def apply(self, kind, **values):
        self.cluster.apply(row_of({"time": self.clock, "kind": kind, "generation": self.cluster.generation, **values}))

    def start(self, step=None):
        nodes = [node for node in NODES + self.spares if node not in self.cluster.out][:4]
        self.cluster.generation += 1
        self.apply("attempt", nodes=nodes, resume_step=None)
        self.cluster.spares = tuple(node for node in self.spares if node not in (*nodes, *self.cluster.out))
        if step is not None:
            self.apply("first_step", step=step)

    def fail(self, cause, node="n2", rank=None, step=None, seconds=60.0, alive=False, **values):
        """The decision about a failure `seconds` after the one before; the next attempt has begun after it."""
        if step is not None:
            self.apply("progress" if self.cluster.first_step else "first_step", step=step)
        self.clock += seconds
        rule = RULES[cause]
        said = Diagnosis(cause, node, rank, rule.role, rule.severity, rule.confidence, self.clock)
        key = {"node": node, "rank": rank}.get(rule.repeats)
        said.fingerprint = f"{cause} on {key}"
        said.evidence.append(Evidence(self.clock, node or "", "rank", cause, rank, cause, values))
        decision = decide(said, self.cluster, RULES, alive)
        self.apply("diagnosis", cause=cause, node=node, rank=rank, fingerprint=said.fingerprint)
        self.cluster.apply(replace(decision, time=self.clock, generation=self.cluster.generation))
        if not alive:
            self.start()
        return decision

    def actions(self, *causes, **more):
        return [self.fail(cause, **more).action for cause in causes]


@pytest.mark.parametrize(
    "cause, action",
    [
        ("ras_ue", "exchange"),
        ("node_lost", "exchange"),
        ("ring_timeout", "restart"),
        ("oom_kill", "restart"),
        ("user_error", "stop"),
        ("wrong_command", "stop"),
        ("hang", "restart"),
        ("memfault_user", "restart"),
        ("port_in_use", "restart"),
        ("hip_oom", "stop"),  # before the first step: the settings are too large
    ],
)
def test_the_first_failure_of_a_class(cause, action):
    assert Run().fail(cause).action == action


def test_a_second_failure_of_one_node_within_a_day_exchanges_it_and_one_of_another_node_does_not():
    run = Run()
    assert run.fail("ring_timeout", "n2", step=5).action == "restart"
    assert run.fail("ring_timeout", "n3", step=9).action == "restart"
    assert run.fail("ring_timeout", "n2", step=12).nodes_out == ("n2",)
    late = Run()
    assert late.actions("ring_timeout", "ring_timeout", step=5, seconds=90_000.0) == ["restart", "restart"]


def test_a_link_is_waited_for_once_and_its_node_exchanged_the_second_time_in_five_minutes():
    run = Run()
    assert [run.fail("ionic_link", alive=True, seconds=seconds).action for seconds in (1, 301, 299)] == [
        "ride",
        "ride",
        "exchange",
    ]


@pytest.mark.parametrize(
    "spares, sizes, requeue, action",
    [
        ((), (4,), False, "restart"),
        ((), (4, 3), False, "shrink"),
        ((), (4, 2), False, "shrink"),
        ((), (4,), True, "requeue"),
    ],
)
def test_a_broken_node_without_a_spare(spares, sizes, requeue, action):
    decision = Run(spares, sizes, requeue=requeue).fail("ras_ue")
    assert decision.action == action and decision.nodes_out == (() if action == "restart" else ("n2",))


def test_a_hang_that_comes_again_takes_the_parallel_group_out_where_spares_allow():
    for spares, out in ((("n5", "n6"), ("n3", "n4")), (("n5",), ("n4",))):
        run = Run(spares, group=2)
        assert run.fail("hang", "n4", 7, step=5).action == "restart"
        assert run.fail("hang", "n4", 7, step=9).nodes_out == out


def test_the_same_cause_three_times_without_a_new_step_stops_and_a_new_step_resets_the_count():
    assert Run().actions("segfault", "segfault", "segfault", rank=1) == ["restart", "restart", "stop"]
    run = Run()
    assert [run.fail("segfault", step=step).action for step in (5, 5, 6, 7, 8, 9)] == ["restart"] * 6


def test_causes_that_differ_stop_only_after_the_budget():
    run = Run()
    causes = ["segfault", "port_in_use", "abort", "sigkill"] * 2 + ["rank_failed", "bus_error", "conn_reset"]
    assert run.actions(*causes, node=None) == ["restart"] * 10 + ["stop"]


def test_the_pauses_grow_with_failures_without_a_step():
    run = Run()
    causes = ["segfault", "port_in_use", "abort", "sigkill", "rank_failed"]
    assert [run.fail(cause).delay for cause in causes] == [0.0, 0.0, 5.0, 10.0, 20.0]


def test_a_persistent_verdict_takes_out_the_node_that_asked_and_not_the_one_that_tells():
    """The rank that repeats the step well prints it (rerun_state_machine.py, RERUNNING_FROM_CHECKPOINT)."""
    run = Run()
    first = run.fail("rerun_other_gpu", "n2", step=5)
    assert (first.action, first.nodes_out) == ("exchange", ("n2",)) and "n5" in run.cluster.nodes
    verdict = run.fail("rerun_persistent", "n5", step=6)
    assert (verdict.action, verdict.nodes_out) == ("restart", ("n2",))
    assert set(run.cluster.out) == {"n2"}
    places = Run(spares=())  # nodes have changed places
    assert places.fail("rerun_other_gpu", "n2", step=5).action == "restart"
    places.cluster.spares = ("n9",)
    assert places.fail("rerun_persistent", "n3", step=6).nodes_out == ("n2",)
    assert Run().fail("rerun_persistent", "n2").nodes_out == ()


def test_a_spike_goes_back_before_its_first_step_and_the_second_application_error_stops():
    run = Run()
    for step in (8, 16, 24):
        run.apply("checkpoint", step=step)
    decision = run.fail("loss_spike", rank=0, step=30, first_step=20, skip=[20, 23])
    assert (decision.action, decision.to_step, decision.skip) == ("rollback", 16, (20, 23))
    assert run.fail("rerun_application", step=31).action == "stop"  # after a roll back


def test_stages_of_another_program_count_from_one_again_and_are_progress():
    """A curriculum trains 60 steps, then 40 of the next stage: fewer than the steps before, and not without progress."""
    run = Run(stages=True)
    run.apply("first_step", step=1)
    run.apply("progress", step=60)
    run.apply("progress", step=2)
    found = [run.fail("segfault", step=step).action for step in (10, 20, 30, 40)]
    assert found == ["restart"] * 4
    assert [run.fail("segfault", step=40).action for _ in range(2)] == ["restart", "stop"]
    train = Run()  # of `zaya train` a lower step is the same one again
    assert [train.fail("segfault", step=step).action for step in (60, 10, 20)] == ["restart", "restart", "stop"]


def test_long_attempts_of_another_program_are_progress():
    assert Run(stages=True).actions(*["segfault"] * 4, step=9, seconds=LONG_ATTEMPT_SECONDS + 1) == ["restart"] * 4
    assert Run().actions(*["segfault"] * 3, step=9, seconds=LONG_ATTEMPT_SECONDS + 1) == ["restart", "restart", "stop"]
