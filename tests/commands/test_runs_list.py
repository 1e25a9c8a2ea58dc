# SPDX-License-Identifier: Apache-2.0
"""`zaya runs list`: the table of the runs below a folder."""

import json
import shutil

import pytest

from tests.aegis.journals import ONE_CRASH, write
from zaya_plugin import cli


@pytest.fixture
def runs(tmp_path):
    """Three runs with other learning rates; the last one's loss is no number, and Aegis supervised it."""
    for name, loss, lr, step, rate in (
        ("9", 4.5, 0.001, 2, 9000.0),
        ("10", 2.25, 0.002, 1, 4000.0),
        ("b/c", float("nan"), 0.002, 2, float("nan")),
    ):
        place = tmp_path / name
        place.mkdir(parents=True)
        rows = [
            {"step": 1, "loss": 9.0, "step_s": 0.5},
            {"step": step, "loss": loss, "step_s": 0.5, "tokens_per_s": rate},
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (place / "metrics.jsonl").write_text(text + json.dumps({"step": 2, "valid_loss": 1.0}) + '\n{"step": 3, "lo')
        (place / "recipe.yaml").write_text(f"run_dir: {name}\noptim: {{lr: {lr}}}\nstage: {{train_iters: 2}}\n")
    write(tmp_path / "b" / "c", ONE_CRASH)
    return tmp_path


def listed(runs, capsys, *words):
    assert cli.main(["runs", "list", str(runs), *words]) == 0
    return capsys.readouterr().out


def test_table(runs, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert listed(runs, capsys).splitlines() == [
        "name  state            step    loss  tokens/s  differs in",
        "9     finished          2/2  4.5000     9,000  lr=0.001",
        "10    running           1/2  2.2500     4,000  lr=0.002",
        "b/c   finished, aegis   2/2       -         -  lr=0.002",
    ]
    monkeypatch.setenv("COLUMNS", "80")
    (runs / "9" / "recipe.yaml").write_text(
        "optim: {lr: 0.001}\nstage: {train_iters: 2}\nnames: {lr: " + "long " * 30 + "}\n"
    )
    lines = listed(runs, capsys).splitlines()
    assert max(map(len, lines)) <= 80 and lines[1].endswith("  optim.lr=0.001 names.lr=long l...")


@pytest.mark.parametrize(
    ("key", "order"),
    [
        ("loss", ["10", "9", "b/c"]),
        ("tokens/s", ["9", "10", "b/c"]),
        ("name", ["9", "10", "b/c"]),
        ("step", ["9", "b/c", "10"]),
        ("state", ["9", "b/c", "10"]),
    ],
)
def test_order(runs, capsys, key, order):
    rows = json.loads(listed(runs, capsys, "--sort", key, "--json"))
    assert [row["name"] for row in rows] == order
    assert {row["name"]: row["loss"] for row in rows} == {"9": 4.5, "10": 2.25, "b/c": None}
    assert rows[0]["differs"] == {"optim.lr": 0.002 if order[0] == "10" else 0.001}
    assert [row["supervised"] for row in rows if row["name"] == "b/c"] == [True]


def test_one_run_and_none(runs, capsys):
    assert listed(runs / "9", capsys).splitlines()[1].split() == ["9", "finished", "2/2", "4.5000", "9,000"]
    for name in ("9", "10", "b"):
        shutil.rmtree(runs / name)
    for folder, problem in ((runs, "holds no run"), (runs / "no", "does not exist")):
        assert cli.main(["runs", "list", str(folder)]) == 2
        assert f"DIR={folder}: {problem}" in capsys.readouterr().err
