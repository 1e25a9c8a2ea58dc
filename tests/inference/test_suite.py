# SPDX-License-Identifier: Apache-2.0
"""Suites of benchmarks without lm_eval: what is read, run, continued and printed. tests/inference/test_harness.py runs one
on local tasks with that package.
"""

import json

import pytest
import yaml

from zaya_plugin import cli
from zaya_plugin.commands.evaluation_suite import RUNS_CODE, SUITES, read_suite, run_suite, suite_table

SUITE = {
    "models": ["Theirs", "Others"],
    "notes": ["a note"],
    "benchmarks": [
        {
            "title": "One",
            "kind": "knowledge",
            "task": "one",
            "shots": 5,
            "metric": "acc",
            "published": {"Theirs": 70.25},
        },
        {"title": "Two", "kind": "code", "task": "two", "shots": 0, "metric": "pass@1", "runs_code": True},
        {"title": "Three", "kind": "tools", "task": None, "published": {"Others": 9}, "differs": "another setting"},
        {"title": "Four", "kind": "text", "task": "four", "shots": 0, "metric": "score", "scale": 1},
    ],
}
SOURCE = {
    "model": "runs/mine",
    "step": 3,
    "suite": "small",
    "limit": None,
    "tasks_dir": None,
    "dtype": "bfloat16",
    "tokenizer": "/words",
    "lm_eval": "0.4.13",
}
FIGURES = {
    "one": {"acc": 0.5, "acc_stderr": 0.0123},
    "two": {"pass@1 (create_test)": 0.125},
    "four": {"score (strict)": 41.0, "score (loose)": 99.0},
}


def test_every_row_of_a_packaged_suite_is_complete():
    """And the group that lm_eval reads has the tasks of the rows."""
    for file in SUITES.glob("*.yaml"):
        document, suite = yaml.safe_load(file.read_text()), read_suite(file.stem)
        rows = suite["benchmarks"]
        assert document["group"] == file.stem and document["task"] == [row["task"] for row in rows if row["task"]]
        for row in rows:
            assert {"title", "kind", "source"} <= row.keys() and row["source"] in ("report", "choice"), row
            assert row["task"] is None or {"shots", "metric"} <= row.keys(), row
            assert {*row.get("published", {})} <= {*suite["models"]}, row
            assert (row["source"] == "report") == ("ZAYA1-8B" in row.get("published", {})) or file.stem != "zaya1", row
        columns = {name for row in rows for name in row.get("published", {})}
        sourced = {name for note in suite["notes"] for name in note.partition(":")[0].split(", ")}
        assert columns <= sourced, "a column has no source"


def test_a_suite_continues_where_it_ended(tmp_path, monkeypatch):
    monkeypatch.delenv(RUNS_CODE, raising=False)
    output, asked, said = tmp_path / "found.json", [], []

    def score(task: str, shots: int) -> dict:
        asked.append((task, shots))
        if task == "four" and len(asked) == 2:
            raise KeyboardInterrupt
        return FIGURES[task]

    with pytest.raises(KeyboardInterrupt):
        run_suite(SUITE, SOURCE, output, lambda task: True, score, said.append)
    assert json.loads(output.read_text()) == {**SOURCE, "results": {"one": FIGURES["one"]}}
    results, left_out = run_suite(SUITE, SOURCE, output, lambda task: True, score, said.append)
    assert asked == [("one", 5), ("four", 0), ("four", 0)] and said == [f"one: from {output}"]
    assert left_out == {"two": "it runs code that the model wrote, for which HF_ALLOW_CODE_EVAL=1 must be set"}
    monkeypatch.setenv(RUNS_CODE, "1")
    results, left_out = run_suite(SUITE, SOURCE, output, lambda task: task != "four", score, said.append)
    assert results == FIGURES and left_out == {}, "what was run stays, though its task is gone"
    different = {"step": 4, "limit": 10, "tasks_dir": "/t", "dtype": "float32", "tokenizer": "/w", "lm_eval": "0.5"}
    for key, value in different.items():
        source, words = {**SOURCE, key: value}, f"{key}={SOURCE[key]}"
        with pytest.raises(ValueError, match=rf"^--output={output}: holds {words}\. .* Fix: --output FILE\.$"):
            run_suite(SUITE, source, output, lambda task: True, score, said.append)
    output.write_text("[]")
    with pytest.raises(ValueError, match="holds no results of a suite"):
        run_suite(SUITE, SOURCE, output, lambda task: True, score, said.append)


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named\n 'math_verify'"), RuntimeError("x" * 1000)])
def test_a_task_that_fails_is_left_out_and_tried_again(error, tmp_path, monkeypatch):
    monkeypatch.setenv(RUNS_CODE, "1")
    output, said, fails = tmp_path / "found.json", [], True

    def score(task: str, shots: int) -> dict:
        if task == "one" and fails:
            raise error
        return FIGURES[task]

    results, left_out = run_suite(SUITE, SOURCE, output, lambda task: True, score, said.append)
    assert results == {task: FIGURES[task] for task in ("two", "four")} == json.loads(output.read_text())["results"]
    name = type(error).__name__
    assert left_out.keys() == {"one"} and left_out["one"].startswith(f"{name}: ") and len(left_out["one"]) <= 400
    assert said == [f"one: {left_out['one']}"]
    assert name == "RuntimeError" or left_out["one"] == "ModuleNotFoundError: No module named 'math_verify'"
    assert f"One: left out, {left_out['one']}" in suite_table(SUITE, SOURCE, results, left_out)
    fails = False
    assert run_suite(SUITE, SOURCE, output, lambda task: True, score, said.append) == (FIGURES, {})


def test_the_table_has_published_figures_beside_the_models():
    found = {task: FIGURES[task] for task in ("one", "four")}
    lines = suite_table(SUITE, SOURCE, found, {"two": "no such task there"}).splitlines()
    assert [line.split() for line in lines[:5]] == [
        ["kind", "benchmark", "shots", "metric", "mine", "+-", "Theirs", "Others"],
        ["knowledge", "One", "5", "acc", "50.0", "1.2", "70.2", "-"],
        ["code", "Two", "0", "pass@1", "-", "-", "-"],
        ["tools", "Three", "-", "-", "9.0"],
        ["text", "Four", "0", "score", "(strict)", "41.0", "-", "-"],
    ]
    assert lines[5:] == [
        "",
        "Two: left out, no such task there",
        "Three: not run, the suite has no task for it",
        "Three: another setting",
        "a note",
    ]
    options = {**SOURCE, "limit": 10, "tasks_dir": "/t"}
    assert suite_table(SUITE, options, found, {}).splitlines()[5:8] == [
        "",
        "--limit 10: figures are of the first 10 documents of each task",
        "--tasks-dir /t: tasks are those of that folder, not lm_eval's",
    ]
    loose = {**SUITE, "benchmarks": [{**SUITE["benchmarks"][3], "filter": "loose"}]}
    assert suite_table(loose, SOURCE, found, {}).splitlines()[1].split()[3:6] == ["score", "(loose)", "99.0"]


@pytest.mark.parametrize(
    "words, message",
    [
        (["--suite", "nope"], "--suite=nope: no such suite. Allowed: zaya1. Fix: --suite zaya1."),
        (["--tasks-dir", "x", "--data"], "--tasks-dir=x: requires --suite. Fix: leave --tasks-dir out."),
        (["--suite", "zaya1", "--data"], "--suite=zaya1: is evaluated alone, without --tasks and --data."),
        (
            ["--suite", "zaya1", "--output", "a.txt"],
            "--output=a.txt: must end in .json: the table is written to a .txt of the same name. Fix: --output a.json.",
        ),
        (["--suite", "zaya1", "--tasks-dir", "nowhere"], "--tasks-dir=nowhere: must be a folder."),
    ],
)
def test_mistakes(words, message, capsys):
    assert cli.main(["eval", "model", *words]) == 2
    assert message in capsys.readouterr().err
