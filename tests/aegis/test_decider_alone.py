# SPDX-License-Identifier: Apache-2.0
"""The decider without processes: from evidence to a decision."""

import time

import pytest

from tests.aegis.lone_decider import rows, settle
from zaya_plugin.aegis.attempt_phases import Phase
from zaya_plugin.aegis.decider import Decider
from zaya_plugin.aegis.diagnose.diagnosis import PROBE_SECONDS
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.aegis.protocol import Decision, Diagnosis


@pytest.mark.parametrize("others, action", [((), ["exchange"]), (("n1",), []), (("n3",), [])])
def test_a_disk_that_fails_on_one_node_alone_is_exchanged_and_a_file_server_is_not(decider, others, action):
    for node in ("n2", *others):
        decider.add(Evidence(time.time() - PROBE_SECONDS, node, "storage", "Input/output error", rule="eio"), 1)
    assert [row["evidence"]["node"] for row in rows(decider, "symptom")][:1] == ["n2"]
    decider.watch()
    if decider.clock.phase is Phase.SETTLE:
        settle(decider)
    assert [row["action"] for row in rows(decider, "decision")] == action


@pytest.mark.parametrize("old", [0.0, 1400.0, 90_000.0])
def test_sure_evidence_is_the_cause_whatever_its_clock_says(decider, old):
    """Kernel lines have the time since the boot; a clock that is set, or a recorded line, makes them look old."""
    decider.add(Evidence(time.time() - old, "n2", "kernel", "uncorrectable hardware error", rule="ras_ue"), 1)
    settle(decider)
    assert [(row["cause"], row["node"]) for row in rows(decider, "diagnosis")] == [("ras_ue", "n2")]
    assert [row["action"] for row in rows(decider, "decision")] == ["exchange"]


def test_an_alert_speaks_amds_code_of_the_cause(decider, monkeypatch):
    told = []
    monkeypatch.setattr(decider.alerts, "send", lambda text, **facts: told.append(facts))
    decider.begin_diagnosis(Evidence(time.time(), "n2", "kernel", "uncorrectable hardware error", rule="ras_ue"))
    decider.decide(decider.observations.symptom, alive=False)
    assert (told[0]["cause"], told[0]["safe_code"]) == ("ras_ue", "008")


def test_a_decider_killed_right_after_a_decision_knows_which_node_it_left_out(decider):
    decider.write(Diagnosis("ras_ue", "n2", fingerprint="ras_ue on n2"))
    decider.write(Decision("exchange", "broken", ("n2",)))
    again = Decider(decider.settings, b"s" * 32, None)
    assert again.cluster.out == {"n2": "ras_ue"}
    again.record.journal.close()


def test_heartbeats_that_arrive_while_the_decider_is_held_count(decider, monkeypatch):
    """As by a file server that does not answer a write of the journal."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(decider.peers, "exchange", lambda timeout, handle: None)
    monkeypatch.setattr(decider.alerts, "poll", lambda: now.__setitem__(0, now[0] + 60.0) or [])
    for peer in decider.peers.by_node.values():
        peer.beat = 99.0
    decider.tick()
    assert len(decider.peers.by_node) == 3 and not rows(decider, "symptom")


def test_a_run_that_hangs_until_it_is_given_up_ends_with_the_code_of_a_hang(decider):
    assert decider.observations.failed_code() == 1
    decider.write(Diagnosis("hang", "n2", 1, fingerprint="hang of rank 1"))
    decider.write(Decision("stop", "hangs"))
    assert decider.observations.failed_code() == 100


def test_a_disk_that_fails_changes_nothing_where_no_spare_is_left(decider):
    del decider.peers.by_node["n3"]
    decider.add(Evidence(time.time() - PROBE_SECONDS, "n2", "storage", "Input/output error", rule="eio"), 1)
    decider.watch()
    assert decider.clock.phase is Phase.RUN and rows(decider, "decision") == []


def test_a_spike_that_comes_again_goes_back_further(decider):
    values = {"step": 23, "first_step": 20}
    for port in (29501, 29502):
        spike = Evidence(time.time(), "n2", "rank", "spiked", 1, "loss_spike", values)
        decider.cluster.checkpoints = [8, 16]
        decider.begin_diagnosis(spike)
        decider.observations.evidence.append(spike)
        decider.decide(spike, alive=False, result=decider.observations.diagnose(decider.steps.stepped))
        decider.attempt.start(port)
    assert [row["to_step"] for row in rows(decider, "decision")] == [16, 8]
