# SPDX-License-Identifier: Apache-2.0
"""The history of nodes: what one run writes is what the next one goes by."""

import json
import time

import pytest

from tests.aegis.journals import lines
from tests.aegis.lone_decider import Wire, settle
from zaya_plugin.aegis.attempt_phases import BETTER_SECONDS, Phase
from zaya_plugin.aegis.decider import Decider
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.aegis.node_history import HISTORY_SECONDS, QUARANTINE_FAILURES, NodeHistory
from zaya_plugin.aegis.protocol import Join
from zaya_plugin.aegis.settings import Settings


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path


class Run:
    """A run of two nodes and a spare in a folder of its own, with its decider and its journal."""

    def __init__(self, folder, spares=1):
        settings = Settings(("zaya", "train"), "rank", "n1", 2, spares, (2,), 1, folder, "h", 1)
        self.decider = Decider(settings, b"s" * 32, None)

    def join(self, *names):
        for node in names:
            wire = Wire()
            self.decider.peers.by_link[wire] = None
            self.decider.on_join(wire, Join(0, node, f"10.0.0.{node[1:]}", int(node[1:]), [], {}))
        if self.decider.clock.phase is Phase.RUN:
            self.decider.watch()
        return self

    def attempt(self):
        """Begin an attempt, if the decider wants to; return its nodes."""
        self.decider.attempt.wait_for_nodes()
        if self.decider.clock.phase is not Phase.PORT:
            return None
        self.decider.attempt.start(29500)
        return self.rows("attempt")[-1]["nodes"]

    def lose(self, node):
        """The node does not answer; its ranks end, and the decision is carried out. It comes back later."""
        self.decider.lose(node, "silent")
        settle(self.decider)
        for each in tuple(self.decider.attempt.stopping):
            self.decider.attempt.ended(each, [])
        self.decider.attempt.wait_for_ends()
        self.decider.clock.since -= self.decider.cluster.pending.delay
        self.decider.attempt.carry_out()

    def rows(self, kind):
        return lines(self.decider.settings.journal, kind)

    def end(self):
        self.decider.finish(0, "done")
        self.decider.record.journal.close()


def test_a_node_that_failed_in_two_runs_is_taken_last_by_the_third(home):
    first = Run(home / "first").join("n1", "n2", "n3")
    assert first.attempt() == ["n1", "n2"]
    first.lose("n2")
    assert first.join("n2").attempt() == ["n1", "n3"]
    first.end()

    second = Run(home / "second").join("n2", "n1")
    assert second.attempt() == ["n1", "n2"]  # once is no reason to wait for a better one
    second.join("n3").lose("n2")
    assert second.attempt() == ["n1", "n3"]
    second.lose("n3")
    second.join("n2")
    assert second.attempt() == ["n1", "n2"]  # n3 is out, though it failed less often
    second.lose("n2")
    second.end()

    told = [json.loads(line) for line in (home / "state/zaya_plugin/nodes.jsonl").read_text().splitlines()]
    assert [(row["node"], row["cause"], row["run"].rpartition("/")[2]) for row in told] == [
        ("n2", "node_lost", "first"),
        ("n2", "node_lost", "second"),
        ("n3", "node_lost", "second"),
        ("n2", "node_lost", "second"),
    ]
    assert NodeHistory().quarantined("n2") and not NodeHistory().quarantined("n3")

    third = Run(home / "third").join("n2", "n3")  # n2 is quick, as a node often is that has just been started again
    assert third.attempt() is None and third.rows("decision") == []
    assert third.join("n1").attempt() == ["n1", "n3"]
    joined = {row["node"]: row["reason"] for row in third.rows("node")}
    assert joined["n2"] == "10.0.0.2, failed 3 times in 30 days" and joined["n1"] == "10.0.0.1"
    third.lose("n3")
    assert third.attempt() == ["n1", "n2"]  # better than none
    third.end()


def test_a_node_that_no_spare_can_replace_is_remembered_too(home):
    run = Run(home / "run", spares=0).join("n1", "n2")
    run.attempt()
    run.lose("n2")
    assert run.rows("decision")[0]["action"] == "restart" and NodeHistory().failures == {"n2": 1}
    run.join("n2").attempt()
    for node, rule, values in (("n1", "segfault", {}), ("n1", "agent_lost", {"back": True}), ("n1", "eio", {})):
        run.decider.decide(Evidence(time.time(), node, "rank", "text", 0, rule, values), alive=False)
        run.decider.cluster.running = True
    assert [row["action"] for row in run.rows("decision")] == ["restart"] * 4
    assert NodeHistory().failures == {"n2": 1, "n1": 1}  # of the disk alone
    run.end()


def test_a_quarantined_node_is_used_where_no_other_one_comes(home):
    for _ in range(QUARANTINE_FAILURES):
        NodeHistory().add("n2", "node_lost", "earlier")
    run = Run(home / "run").join("n1", "n2")
    assert run.attempt() is None
    run.decider.clock.since -= BETTER_SECONDS
    assert run.attempt() == ["n1", "n2"]
    run.end()
    again = Run(home / "again").join("n2", "n1", "n3")
    assert again.attempt() == ["n1", "n3"]  # all are there: nothing to wait for
    again.end()


def test_a_node_that_fails_in_another_run_is_the_last_spare(home):
    this, other = Run(home / "this", spares=2).join("n1", "n2", "n3", "n4"), Run(home / "other").join("n3", "n5", "n6")
    assert (this.attempt(), other.attempt()) == (["n1", "n2"], ["n3", "n5"])
    other.lose("n3")
    this.lose("n2")
    assert this.attempt() == ["n1", "n4"]
    for run in (this, other):
        run.end()


def test_old_failures_and_damaged_lines_do_not_count(home, monkeypatch):
    history = NodeHistory()
    history.add("n1", "ras_ue", "run")
    with open(history.path, "ab") as file:
        file.write(b'{"time": 1e12, "node": "n2"')  # the disk was full
    history.add("n1", "ras_ue", "run")
    with open(history.path, "ab") as file:
        file.write(b'\xff\n[]\n{"time": "x", "node": "n3"}\n{"node": "n4"}\n' + b"[" * 100_000 + b"\n")
    assert NodeHistory().failures == {"n1": 2}
    later = time.time() + HISTORY_SECONDS + 60
    monkeypatch.setattr(time, "time", lambda: later)
    assert NodeHistory().failures == {}
