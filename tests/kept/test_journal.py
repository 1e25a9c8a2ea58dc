# SPDX-License-Identifier: Apache-2.0
"""A journal that commit 04c135c wrote replays to the state, the account and the status that it had there."""

import dataclasses
import json
from pathlib import Path

import pytest

from zaya_plugin.aegis.bookkeeping import account
from zaya_plugin.aegis.diagnose.cluster import Cluster
from zaya_plugin.aegis.journal import read
from zaya_plugin.aegis.protocol import ROWS, Row
from zaya_plugin.aegis.report import as_json
from zaya_plugin.aegis.status import status

JOURNAL = Path(__file__).with_name("journal.jsonl")


def test_every_row_is_read():
    lines, rows = [json.loads(line) for line in JOURNAL.open()], list(read(JOURNAL))
    assert len(rows) == 54 and Row not in map(type, rows)
    assert {type(row) for row in rows} == {*ROWS.values()} - {ROWS["end"]}
    for line, row in zip(lines, rows, strict=True):
        assert all(value == getattr(row, name) for name, value in line.items() if name not in ("kind", "evidence"))


def test_the_state_of_the_run_is_the_same():
    cluster = dataclasses.asdict(Cluster((2,)).replay(read(JOURNAL)))
    failures = [
        (one["cause"], one["node"], one["step"], one["best"], one["fingerprint"]) for one in cluster.pop("failures")
    ]
    assert failures == [
        ("sigkill", "n2", 320, (0, 320), "sigkill on n2"),
        ("loss_spike", "n1", 440, (0, 440), "loss_spike"),
        ("ras_ue", "n2", 540, (0, 540), "ras_ue on n2"),
        ("node_lost", "n1", 420, (0, 540), "node_lost on n1"),
    ]
    assert {name: value for name, value in cluster.items() if value} == {
        "sizes": (2,),
        "group": 1,
        "restarts": 10,
        "begun": True,
        "command": ["zaya", "train", "experiment=cpu_demo", "data.skip_steps=[5]", "--password", "<removed>"],
        "generation": 5,
        "trained": True,
        "since": 1795345515.3999996,
        "running": True,
        "nodes": ("n4", "n3"),
        "used": {"n1", "n2", "n3", "n4"},
        "out": {"n2": "ras_ue"},
        "resume_step": 300,
        "first_step": 301,
        "step": 560,
        "best": 560,
        "step_seconds": 0.25,
        "checkpoints": [100, 200, 300],
        "rides": [(1795345288.0, "n2")],
        "rollbacks": 1,
        "skips": [(380, 442)],
    }


def test_the_end_of_that_run_as_the_same_commit_wrote_it_ends_it(tmp_path):
    end = {"time": 1795345590.0, "kind": "end", "generation": 5, "code": 75, "reason": "the run was asked to end"}
    path = tmp_path / "journal.jsonl"
    path.write_text(JOURNAL.read_text() + json.dumps(end) + "\n")
    cluster, result = Cluster((2,)).replay(read(path)), account(read(path))
    assert (cluster.ended, cluster.running, cluster.pending, cluster.best) == (True, False, None, 560)
    assert (result.ended, result.code, result.reason) == (True, 75, end["reason"])
    lines, code, _ = status(read(path), 1795345600.0)
    assert code == 0 and lines[0] == "state          ended, exit code 75, since 10.0 s"


def test_the_account_and_the_status_are_the_same():
    figures = as_json(account(read(JOURNAL)))
    expected = {"ettr": 0.3563023016106656, "goodput": 0.36610878697609683, "uptime": 0.9937238503636914}
    expected |= {"kept_steps": 560.0, "lost_steps": 620.0, "mean_recover": 17.09999990463257}
    assert {name: figures[name] for name in expected} == pytest.approx(expected, rel=1e-12)
    assert figures["decisions"] == {"ride": 1, "restart": 1, "rollback": 1, "exchange": 2}
    lines, code, _ = status(read(JOURNAL), 1795345588.4)
    assert code == 0 and lines == [
        "state          trains, since 6.0 s",
        "step           560, 0.25 s a step",
        "last progress  6.0 s ago",
        "attempt        5, 2 ranks, from step 300; 4 failures so far",
        "nodes          2 of 2 train, 1 spare: n1, away: n2 (out)",
        "last failure   node_lost on n1, 74.1 s ago: the agent is silent for 6 s",
        "decision       exchange: node_lost on n1: exchanged for a spare",
        "training       35.63 % of 6 min 22 s, 620 steps made again",
    ]
