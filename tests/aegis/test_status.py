# SPDX-License-Identifier: Apache-2.0
"""`zaya aegis status`: what it says and its exit code, at each moment of a run's life."""

import json
import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.aegis.journals import BEGIN, ONE_CRASH, attempt, begin, failure, first_step, row, write
from zaya_plugin import cli
from zaya_plugin.aegis.protocol import row_of
from zaya_plugin.aegis.status import last_metrics, status

CRASH = failure(101.5, 101.0, "sigkill", "restart", 40, 100.0)
TRAINS = [begin(0), row(1, "node", 0, node="n1", state="joined", reason="a"), attempt(10, 1), first_step(22, 1)]
JOINED = [row(2, "node", 0, node=name, state="joined", reason="a") for name in ("n2", "n3")]


def said(rows, now, metrics=None):
    lines, code, _ = status(map(row_of, rows), BEGIN + now, metrics)
    found = {line[:15].strip(): line[15:] for line in lines}
    assert len(found) == len(lines)
    return found, code


@pytest.mark.parametrize(
    ("rows", "now", "state", "code"),
    [
        ([begin(0)], 5, "waits for nodes, since 5.0 s", 0),
        ([begin(0)], 4000, "waits for nodes, since 1 h 07 min", 1),
        ([begin(0), attempt(10, 1)], 40, "starts, since 30.0 s", 0),
        ([begin(0), attempt(10, 1)], 3700, "starts, since 1 h 02 min", 1),
        (TRAINS, 60, "trains, since 50.0 s", 0),
        (TRAINS, 700, "trains, since 11 min 30 s", 1),
        ([*TRAINS, *CRASH], 104, "down, restart, since 1.5 s", 1),
        ([*TRAINS, *CRASH, attempt(106, 2, 30)], 108, "starts, since 2.0 s", 0),
        (ONE_CRASH, 9000, "ended, exit code 0, since 2 h 25 min", 0),
        ([*TRAINS, row(30, "end", code=75, reason="asked")], 31, "ended, exit code 75, since 1.0 s", 0),
        ([*TRAINS, row(30, "end", code=2, reason="bad recipe")], 31, "ended, exit code 2, since 1.0 s", 1),
    ],
)
def test_state_and_exit_code(rows, now, state, code):
    found, given = said(rows, now)
    assert (found["state"], given) == (state, code)
    assert ("trouble" in found) == bool(code)


def test_what_a_person_asks_first():
    rows = [*TRAINS[:2], *JOINED, *TRAINS[2:], row(82, "progress", step=31, step_seconds=2.0), *CRASH]
    rows += [row(103, "node", node="n2", state="out", reason="x"), attempt(106, 2, 30), first_step(130, 31, 2)]
    found, code = said(rows, 140)
    assert code == 0 and found["step"] == "31, 2 s a step" and found["last progress"] == "10.0 s ago"
    assert found["attempt"] == "2, 16 ranks, from step 30; 1 failure so far"
    assert found["nodes"] == "2 of 2 train, 1 spare: n3, away: n2 (out)"
    assert found["last failure"] == "sigkill on n2, rank 9, 37.5 s ago: seen: sigkill"
    assert found["decision"] == "restart: sigkill: restart"


def test_the_last_line_of_metrics_is_newer_than_the_journal(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 7, "loss": 3.25}) + '\n{"step": 8, "lo')
    os.utime(tmp_path / "metrics.jsonl", (BEGIN + 640, BEGIN + 640))
    metrics = last_metrics(tmp_path)
    found, code = said(TRAINS, 700, metrics)
    assert (found["step"], found["last progress"], code) == ("7, loss 3.2500", "60.0 s ago", 0)
    os.utime(tmp_path / "metrics.jsonl", (BEGIN - 5, BEGIN - 5))  # of an earlier attempt
    assert said(TRAINS, 700, last_metrics(tmp_path))[0]["step"] == "1"
    assert last_metrics(tmp_path / "none") is None


def test_the_command_reads_only(tmp_path, capsys):
    run = write(tmp_path / "run", [*ONE_CRASH, {"kind": "node"}, {"kind": "attempt", "time": "x"}])
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    assert cli.main(["aegis", "status", str(run), "--watch"]) == 0  # no terminal: once
    assert capsys.readouterr().out.startswith("state          ended, exit code 0")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert cli.main(["aegis", "status", str(tmp_path / "none")]) == 2
    (run / "aegis" / "journal.jsonl").write_text("")
    assert cli.main(["aegis", "status", str(run)]) == 1


@pytest.mark.parametrize("wrong", [None, "x", [], {}, [1], float("nan"), -1, True])
def test_fields_of_any_kind_break_nothing(wrong):
    rows = [*TRAINS, *CRASH, row(104, "node", node="n2", state="out", reason="x")]
    for number, each in enumerate(rows):
        for name in each.keys() - {"kind"}:
            lines, *_ = status(map(row_of, [*rows[:number], each | {name: wrong}, *rows[number + 1 :]]), BEGIN + 120)
            assert lines


def test_log_text_cannot_write_to_the_terminal():
    bad = failure(101.5, 101.0, "\x1b[31m", "restart", 40, 100.0, reason="\x1b]0;x\x07")
    lines, *_ = status(map(row_of, [*TRAINS, *bad]), BEGIN + 104)
    assert all(letter.isprintable() for line in lines for letter in line)


def test_watch_shows_it_again_until_the_run_ends(tmp_path):
    run = write(tmp_path / "run", [each | {"time": each["time"] + time.time() - BEGIN - 60} for each in TRAINS])
    main, side = pty.openpty()
    code = "import sys; from zaya_plugin import cli; from zaya_plugin.commands import live; live.SECONDS = 0.05; "
    code += "sys.exit(cli.main(['aegis', 'status', sys.argv[1], '--watch']))"
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    process = subprocess.Popen([sys.executable, "-c", code, str(run)], stdout=side, env=environ)
    os.close(side)
    text = b""
    while text.count(b"\x1b[H") < 3:
        text += os.read(main, 4096)
    with open(run / "aegis" / "journal.jsonl", "a") as file:
        file.write(json.dumps(row(0, "end", code=1, reason="over") | {"time": time.time()}) + "\n")
    assert process.wait(60) == 1
    os.close(main)
