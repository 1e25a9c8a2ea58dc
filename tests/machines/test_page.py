# SPDX-License-Identifier: Apache-2.0
"""The page of `zaya verify`: every check with its state, and nodes with the failing ones first."""

import json

import pytest

from tests.pictures.pages import HOSTILE, read
from zaya_plugin import cli
from zaya_plugin.commands import machines
from zaya_plugin.machines.page import MOST_ROWS, STATE_COLOURS, content
from zaya_plugin.pictures.content import ALARM, GOOD

FACTS = {"command": "zaya verify", "platform": "Linux", "commit": None, "date": "2026-11-27"}


def check(name, state, seconds, reason="fine", **more):
    return {"check": name, "state": state, "seconds": seconds, "reason": reason, "details": [], "overrides": {}} | more


def node(name, *rates, failures=()):
    figures = {"gemm_tflops": {f"gpu{number}": rate for number, rate in enumerate(rates)}} if rates else {}
    return {"node": name, "machine": "MI300X", "figures": figures, "failures": [*failures], "running": "", "notes": []}


def test_the_checks_of_a_machine():
    checks = [check("rates", "pass", 3.5), check("muon", "wrong", 0.25, "error 9 ULP", details=["a", "b"])]
    page = content(FACTS | {"checks": checks, "machine": {"name": "MI300X", "devices": 8}})
    assert (page.title, page.lead) == ("zaya verify: 8 x MI300X", ["zaya verify", "Linux, 2026-11-27"])
    assert [row[:2] for row in page.figures] == [
        *[("pass", "1"), ("slow", "0"), ("wrong", "1"), ("unsupported", "0"), ("skipped", "0")]
    ]
    (panel,) = page.panels
    assert [(bar.row, bar.end, bar.colours) for bar in panel.layers] == [
        ("rates", [3.5], [GOOD]),
        ("muon", [0.25], [STATE_COLOURS["wrong"]]),
    ]
    assert page.tables[0].rows[1] == ("muon", "wrong", "0.2 s", "error 9 ULP")
    assert page.tables[1].rows == [("muon", "a"), ("muon", "b")]


def test_the_figures_of_nodes_with_the_failing_ones_first():
    failing = node("n9", 650.0, 540.0, failures=[["004", "gemm_tflops of gpu1 is 540"]])
    page = content(FACTS | {"nodes": [*(node(f"m{i:03}", 640.0 + i, 650.0) for i in range(99)), failing, node("z")]})
    (panel,), (table,) = page.panels, page.overview
    assert len(panel.rows) == MOST_ROWS and panel.rows[:2] == ["n9", "m000"]
    assert panel.note == "64 of 101 nodes, the failing ones first."
    assert (panel.layers[0].x, panel.layers[0].colours) == ([650.0, 540.0], [ALARM] * 2)
    assert panel.layers[0].texts == ["n9 gpu0: 650", "n9 gpu1: 540"]
    assert table.rows[0] == ("n9", "fail", "540", "gemm_tflops of gpu1 is 540 [AMD code 004]")
    assert table.rows[-1] == ("z", "pass", "-", "") and page.figures[1][:2] == ("fail", "1")


def test_the_command_writes_the_record_and_the_page(tmp_path, monkeypatch, capsys):
    pytest.importorskip("bokeh")

    def examine(checks, command, device, storage, output):
        record = FACTS | {"machine": {}, "checks": [check("hazards", "pass", 1.0, HOSTILE)]}
        output.write_text(json.dumps(record))
        return record

    monkeypatch.setattr(machines, "examine", examine)
    assert cli.main(["verify", "--only", "hazards", "--output", str(tmp_path / "v.html")]) == 0
    assert capsys.readouterr().out.endswith(f"written: {tmp_path}/v.html\n") and (tmp_path / "v.json").is_file()
    assert "1.0 s" in read((tmp_path / "v.html").read_text()).texts
    assert cli.main(["verify", "--output", str(tmp_path / "no" / "v.html")]) == 2
    assert "its folder does not exist" in capsys.readouterr().err
