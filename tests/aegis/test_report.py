# SPDX-License-Identifier: Apache-2.0
"""`zaya aegis report` in the terminal: figures of a journal, and journals that are odd or not there."""

import json
from pathlib import Path

import pytest

from tests.aegis.journals import ONE_CRASH, attempt, begin, failure, first_step, row, write
from zaya_plugin import cli

RECORDED = Path(__file__).parent / "corpus" / "curriculum.jsonl"


def test_the_figures_of_one_crash(tmp_path, capsys):
    assert cli.main(["aegis", "report", str(write(tmp_path / "run", ONE_CRASH))]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "state ended, exit code 0: done" in lines
    assert "effective training time 71.43 % training that was kept / time (ETTR)" in lines
    assert "goodput 71.43 % kept steps x median step time / time" in lines
    assert "uptime 94.46 % time in which ranks were running / time" in lines
    assert "steps lost 10 made, and made again after a failure" in lines
    assert "GPU hours 1.24 0.22 of them lost to failures" in lines
    assert "mean time to detect 0.5 s from the evidence on its node to the symptom" in lines
    assert "sigkill 1 10 50.0 s 0.22" in lines
    assert "1 1970-01-12 13:48:21 UTC 1 sigkill n2 9 restart 0.5 s 30.5 s 10 0.22" in lines


def test_the_same_as_json(tmp_path, capsys):
    assert cli.main(["aegis", "report", str(write(tmp_path / "run", ONE_CRASH) / "aegis"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ettr"] == pytest.approx(200 / 280) and found["gpu_hours"] == pytest.approx(280 * 16 / 3600)
    assert found["by_cause"][0]["cause"] == found["failures"][0]["cause"] == "sigkill"
    assert [one["points"][-1][1] for one in found["attempts"]] == [40, 100]
    assert [one["kept"] for one in found["attempts"]] == [30, 100]


@pytest.mark.parametrize(
    "rows", [[], [begin(0)], [begin(0), attempt(1, 1)], [begin(0), attempt(1, 1), first_step(3, 1)]]
)
def test_a_journal_that_has_just_begun(tmp_path, capsys, rows):
    pytest.importorskip("bokeh")
    run = write(tmp_path / "run", rows)
    assert cli.main(["aegis", "report", str(run), "--output", str(tmp_path / "page.html")]) == 0
    assert ("is empty" if not rows else "up to its last line") in capsys.readouterr().out
    assert "</html>" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "RUN_DIR=nowhere: does not exist."),
        ([""], "has no journal of zaya aegis"),
        (["run", "--output", "no/such/page.html"], "its folder does not exist"),
        (["run", "--output", "run"], "the name of the file has another ending"),
    ],
)
def test_mistakes_of_the_user(tmp_path, capsys, monkeypatch, words, says):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "run", ONE_CRASH)
    assert cli.main(["aegis", "report", *words]) == 2
    assert says in capsys.readouterr().err


def test_control_characters_do_not_reach_the_terminal(tmp_path, capsys):
    rows = [begin(0) | {"command": ["zaya", "\x1b[2J"]}, attempt(0, 1), first_step(2, 1)]
    rows += failure(9, 9, "\x1b[31mred", "restart", 3, 8)
    rows[3]["evidence"]["text"] = "\x07\x1b]0;title\x07"
    rows += [row(12, "decision", action="\x1b[1mwatch", reason="x")]
    run = write(tmp_path / "run", [*rows, row(10, "node", node="\x9b2J", state="out", reason="\r\n")])
    assert cli.main(["aegis", "report", str(run)]) == 0
    assert all(letter.isprintable() or letter == "\n" for letter in capsys.readouterr().out)


def test_a_curriculum_is_counted_on_from_stage_to_stage(tmp_path, capsys):
    """Recorded: 400 steps, then 300 of the next stage; its rank was killed after step 120, and went on from 100."""
    run = write(tmp_path / "run", [json.loads(line) for line in RECORDED.read_text().splitlines()])
    assert cli.main(["aegis", "report", str(run)]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "steps kept 700 0.364 s a step (median)" in lines
    assert "steps lost 20 made, and made again after a failure" in lines
    assert "demo_1 400 0.465 s" in lines and "demo_2 300 0.151 s" in lines
    assert "1 2026-11-26 17:46:51 UTC 5 min 47 s 1 0 of demo_1 120 of demo_2 sigkill n1" in lines
    assert "2 2026-11-26 17:52:39 UTC 3 min 26 s 1 100 of demo_2 300 of demo_2 - n1" in lines
    assert cli.main(["aegis", "report", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["name"], each["before"]) for each in found["stages"]] == [("demo_1", 0), ("demo_2", 400)]
    # 400 steps in 114 s, the steps to 100 of the next stage, and the others in 58 s; its start is no training
    assert found["training"] == pytest.approx(195.5, abs=0.5) and found["ettr"] == pytest.approx(0.3526, abs=1e-4)
    ((last, begin),) = found["attempts"][0]["starts"]
    assert begin - last == pytest.approx(104.6, abs=0.1)
