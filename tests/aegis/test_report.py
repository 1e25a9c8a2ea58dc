# SPDX-License-Identifier: Apache-2.0
"""The account of a run against figures computed by hand, and what is shown of it."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from zaya_plugin.aegis import report, status
from zaya_plugin.aegis.account import account, length
from zaya_plugin.aegis.page import page, timeline


def row(time, kind, generation=1, **values):
    return {"time": float(time), "kind": kind, "generation": generation, **values}


# 8 ranks. Start 0 to 100; steps of 2 s from 100 on; a rank dies at 300 (step 100) and is noticed at 301; the next
# attempt begins from step 80, makes its first step (81) at 340, and step 101 after 20 more of 2 s, at 380. End at 1,000.
ROWS = [
    row(0, "begin", 0, command=["zaya", "train"], nodes=1, spares=1, ranks_per_node=8, version="1"),
    row(1, "node", 0, node="n1", state="joined", reason=""),
    row(1, "node", 0, node="n2", state="joined", reason=""),
    row(10, "attempt", nodes=["n1"], world_size=8, resume_step=None),
    row(100, "first_step", step=1),
    row(160, "progress", step=30, step_seconds=2.0),
    row(262, "checkpoint", step=80),
    row(299, "progress", step=100, step_seconds=2.0),
    row(301, "symptom", evidence={"time": 300.0, "node": "n1", "source": "exit", "text": "killed"}),
    row(302, "diagnosis", cause="sigkill", node="n1", rank=3, role="root", first=300.0, evidence=[], cascades={}),
    row(302, "decision", action="restart", reason="sigkill on n1: restart in place", nodes_out=[]),
    row(303, "stopped", seconds=1.0, survivors=[]),
    row(305, "attempt", 2, nodes=["n1"], world_size=8, resume_step=80),
    row(340, "first_step", 2, step=81),
    row(500, "symptom", 2, evidence={"time": 499.0, "node": "n1", "source": "kernel", "text": "Link down"}),
    row(500, "decision", 2, action="ride", reason="may end by itself"),
    row(900, "progress", 2, step=360, step_seconds=2.0),
]
END = row(1000, "end", 2, code=0, reason="done")


def test_figures_that_were_computed_by_hand():
    found = account([*ROWS, END])
    (failure,) = found.failures
    assert (failure.cause, failure.rank, failure.action, failure.lost_steps) == ("sigkill", 3, "restart", 20)
    assert (failure.restarted, failure.regained) == (340.0, 380.0)
    assert found.wall == 1000 and found.cost(failure) == 80
    assert found.effective == pytest.approx(1 - (100 + 80) / 1000)
    assert found.goodput == pytest.approx(360 * 2 / 1000)
    assert found.mean_seconds() == (1.0, 79.0)
    assert found.lost_hours() == pytest.approx({"start": 800 / 3600, "sigkill": 80 * 8 / 3600})
    assert found.ridden_out == 1 and [each["end"] for each in found.attempts] == [303.0, None]


@pytest.mark.parametrize("count", range(len(ROWS) + 1))
def test_a_journal_of_any_length_has_an_account(count):
    found = account(ROWS[:count], now=1000.0)
    assert 0 <= found.effective <= 1 and found.wall >= 0 and found.code is None
    ElementTree.fromstring(timeline(found))
    assert report.text(found) and status.status(found, ROWS[:count], 1000.0)[0]


def test_a_failure_that_is_not_over_costs_until_now():
    found = account(ROWS[:11], now=400.0)
    assert found.failures[0].regained is None and found.cost(found.failures[0]) == 100
    assert found.mean_seconds() == (1.0, None)
    lines, code = status.status(found, ROWS[:11], 400.0)
    assert "sigkill on n1" in "\n".join(lines) and code == 0
    assert status.status(account(ROWS[:11], now=2000.0), ROWS[:11], 2000.0)[1] == 1, "no step for half an hour"


def test_texts_of_logs_cannot_leave_their_place():
    hostile = "<script>alert('x')</script>\x1b[31m"
    rows = [dict(each, cause=hostile, node=hostile) if each["kind"] == "diagnosis" else each for each in ROWS]
    written = page(account([*rows, END]))
    assert "<script" not in written and "&lt;script&gt;" in written and "http" not in written


def test_commands(tmp_path, capsys):
    (tmp_path / "aegis").mkdir()
    with open(tmp_path / "aegis" / "journal.jsonl", "w") as file:
        file.writelines(json.dumps(each) + "\n" for each in [*ROWS, END])
        file.write('{"time": 3, "ki')
    assert report.main([str(tmp_path), "--html", str(tmp_path / "page" / "report.html")]) == 0
    shown = capsys.readouterr().out
    assert "82.00 %" in shown and "72.00 %" in shown and "sigkill" in shown
    assert (tmp_path / "page" / "report.html").read_text().count("<rect") == 5
    assert report.main([str(tmp_path / "aegis"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["effective_training_time"] == pytest.approx(0.82)
    assert status.main([str(tmp_path), "--watch"]) == 0
    assert "ended with exit code 0: done" in capsys.readouterr().out
    with pytest.raises(ValueError, match="holds no journal.jsonl"):
        report.main([str(tmp_path / "page")])


def test_lengths():
    assert [length(each) for each in (0.44, 59.9, 61, 3600, 123456)] == [
        "0.4 s",
        "59.9 s",
        "1 min 1 s",
        "1 h 0 min",
        "34 h 17 min",
    ]
