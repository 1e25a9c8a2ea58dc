# SPDX-License-Identifier: Apache-2.0
"""A run directory is read whole, whatever state its files are in."""

import json
import os
import subprocess
import sys

import pytest

from tests.aegis.journals import ONE_CRASH, TWO_STAGES, write
from zaya_plugin.ground.lock import Lock
from zaya_plugin.runs.run_data import differences, read_run, run_folders, unique_names


def step(number, **values):
    row = {"step": number, "loss": 8.0 - number / 100, "step_s": 0.5, "eta_s": 10.0, "mfu": None}
    return row | values


def run(folder, rows=(), tail="", recipe="name: mine\nstage:\n  train_iters: 100\n"):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + tail)
    if recipe:
        (folder / "recipe.yaml").write_text(recipe)
    return folder


# A step of 71 bits, a negative one, a number above fp64's range, a loss of 330 digits
ODD_LINES = (
    f'{{"step": {2**70}, "loss": 1.0, "step_s": 0.5}}\n{{"step": -3, "loss": 1.0, "step_s": 0.5}}\n'
    f'{{"step": 8, "loss": 2.0, "step_s": 1e999, "eta_s": 1.0}}\n'
    f'{{"step": 9, "loss": 1{"0" * 329}, "step_s": 0.5, "eta_s": 1.0, "expert_load": [[1{"0" * 329}, 0]]}}\n'
)


def column(data, key):
    steps, values = data.metrics.columns[key]
    return dict(zip(steps, values, strict=True))


def test_of_a_repeated_step_the_later_attempt_counts_and_the_restart_is_marked(tmp_path):
    rows = [step(number, eta_s=None if number < 3 else 9.0, expert_load=[[number / 10, 0.1]]) for number in range(1, 8)]
    rows += [
        {"step": 7, "valid_loss": 9.0},
        step(5, loss=1.0, eta_s=None, expert_load=[[0.25, 0.75], [0.5, 0.5]], loss_spike=7.0),
    ]
    rows += [
        step(6, skipped=1),
        {"step": 6, "valid_loss": 3.0, "validation/web/loss": 4.0},
        {"step": 6, "valid_loss": 2.0},
    ]
    data = read_run(run(tmp_path / "a", rows, tail='{"step": 7, "lo'))
    assert column(data, "loss") == {**{i: 8.0 - i / 100 for i in (1, 2, 3, 4, 6)}, 5: 1.0}
    assert column(data, "valid_loss") == {6: 2.0} and column(data, "validation/web/loss") == {6: 4.0}
    assert [(at, [*load]) for at, load in data.metrics.busiest] == [
        *((number, [number / 5]) for number in (1, 2, 3, 4)),
        (5, [1.5, 1.0]),
    ]
    assert [[*layer] for layer in data.metrics.expert_load] == [[0.25, 0.75], [0.5, 0.5]]
    assert "mfu" not in data.metrics.columns
    assert [(mark.step, mark.kind) for mark in data.marks] == [(5, "restart"), (5, "loss spike"), (6, "skipped update")]
    assert (data.last["step"], data.state) == (6, "running")


def test_a_run_that_went_back_before_its_first_validation_has_none(tmp_path):
    rows = [step(number) for number in range(1, 5)]
    data = read_run(run(tmp_path / "a", [*rows, {"step": 4, "valid_loss": 9.0}, step(2), step(3)]))
    assert column(data, "loss") == {number: 8.0 - number / 100 for number in (1, 2, 3)}
    assert "valid_loss" not in data.metrics.columns


def test_a_run_that_goes_on_after_its_last_row_is_marked_too(tmp_path):
    rows = [step(number, eta_s=None if number in (1, 4, 5) else 9.0) for number in range(1, 8)]
    assert read_run(run(tmp_path / "a", rows)).metrics.restarts == [4]


def test_the_journal_adds_faults_restarts_and_checkpoints(tmp_path):
    place = write(tmp_path / "run", ONE_CRASH)
    data = read_run(run(place, [step(number) for number in range(1, 101)]))
    (place / "checkpoints" / "iter_0000060").mkdir(parents=True)
    (place / "checkpoints" / "iter_0000060" / "manifest.json").write_text("{}")
    expected = [(30, "checkpoint"), (31, "restart"), (40, "fault"), (60, "checkpoint")]
    assert sorted((mark.step, mark.kind) for mark in data.marks) == expected
    assert next(mark.text for mark in data.marks if mark.kind == "fault") == "sigkill on n2, restart"


def test_a_stage_of_a_curriculum_has_the_marks_of_its_own_steps(tmp_path):
    place = write(tmp_path / "run", TWO_STAGES)
    (place / "curriculum.json").write_text("{}")
    one, two = (read_run(run(place / name, [step(1)], recipe="")) for name in ("one", "two"))
    assert [(mark.step, mark.kind) for mark in one.marks] == []
    faults = [(mark.step, mark.kind, mark.text.split()[0]) for mark in two.marks]
    assert sorted(faults) == [(11, "restart", "an"), (15, "fault", "sigkill"), (30, "fault", "ras_ue")]
    assert two.state == "failed" and run_folders(place) == [place / "one", place / "two"]


@pytest.mark.parametrize(
    ("rows", "age", "state"),
    [
        ([], 0, "running"),
        ([], 999, "empty"),
        ([step(1)], 0, "running"),
        ([step(1)], 999, "stopped"),
        ([step(1, step_s=60)], 999, "running"),
        ([step(1, step_s=None)], 999, "stopped"),
        ([step(1, step_s="slow", loss="x", eta_s="x", total_tokens="x")], 999, "stopped"),
        ([step(100)], 999, "finished"),
    ],
)
def test_states(tmp_path, rows, age, state):
    place = run(tmp_path / "a", rows)
    then = os.stat(place / "metrics.jsonl").st_mtime - age
    os.utime(place / "metrics.jsonl", (then, then))
    assert read_run(place).state == state


KILLED = """
import os, pathlib, sys
from zaya_plugin.ground.lock import Lock
Lock.acquire([pathlib.Path(sys.argv[1])], ValueError)
os._exit(9)
"""


def test_states_of_a_run_on_its_own_machine(tmp_path):
    """By its lock and its newest checkpoint, not by the time of its last row."""
    recipe = "stage: {train_iters: 100}\ncheckpoint: {save_interval: 5, path: saved}\n"
    place = run(tmp_path / "a", [step(1), step(2)], recipe=recipe)
    (place / "logs").mkdir()

    def state():
        return read_run(place).state

    with Lock.acquire([place / "run.lock"], ValueError):
        os.utime(place / "metrics.jsonl", (0, 0))
        assert state() == "running"
    os.utime(place / "metrics.jsonl")
    assert state() == "failed"
    (place / "saved" / "iter_0000002").mkdir(parents=True)
    (place / "saved" / "iter_0000002" / "manifest.json").write_text("{}")
    assert state() == "stopped"
    assert subprocess.run([sys.executable, "-c", KILLED, str(place / "run.lock")]).returncode == 9
    assert state() == "crashed"
    with Lock.acquire([place / "run.lock"], ValueError):  # a resumed run takes it over
        assert state() == "running"
    (place / "metrics.jsonl").write_text("")
    assert state() == "failed"


def test_between_two_attempts_a_supervised_run_is_running(tmp_path):
    rows = ONE_CRASH[: next(number for number, row in enumerate(ONE_CRASH) if row["kind"] == "end")]
    place = run(write(tmp_path / "run", rows), [step(number) for number in range(1, 60)])
    (place / "logs").mkdir()
    assert read_run(place).state == "running"
    os.utime(place / "aegis" / "journal.jsonl", (0, 0))
    assert read_run(place).state == "stopped"


@pytest.mark.parametrize(("recipe", "rows"), [("{{{", ()), ("- a\n", ()), ("", ()), ("", [step(1)])])
def test_a_run_without_a_recipe_or_a_row_is_read(tmp_path, recipe, rows):
    data = read_run(run(tmp_path / "a", rows, tail="no json\n[1]\n{}\n", recipe=recipe))
    assert (data.settings, data.last_step, data.journal, data.last.get("step", 0)) == ({}, None, None, len(rows))


def test_runs_below_a_folder_and_what_differs_between_them(tmp_path):
    for name, lr in (("10", 3), ("9", 1), ("other/10", 3)):
        run(tmp_path / "m" / name, recipe=f"run_dir: {name}\noptim: {{lr: {lr}, betas: [1, 2]}}\nseed: 1\n")
    folders = run_folders(tmp_path / "m")
    assert [str(path.relative_to(tmp_path / "m")) for path in folders] == ["9", "10", "other/10"]
    runs = [read_run(path) for path in folders]
    assert differences(runs) == {"optim.lr": [1, 3, 3]} and unique_names(runs) == ["9", "m/10", "other/10"]
    older = run(tmp_path / "older", recipe="optim: {lr: 3, betas: [1, 2]}\n")  # without seed, whose default is 1234
    assert differences([runs[1], read_run(older)]) == {"seed": [1, 1234]}
    with pytest.raises(ValueError, match="RUN=.*/m: has neither metrics.jsonl nor recipe.yaml"):
        read_run(tmp_path / "m")
    with pytest.raises(ValueError, match="does not exist"):
        read_run(tmp_path / "no")
