# SPDX-License-Identifier: Apache-2.0
"""The picture of a run has every number of its files, and says what it leaves out."""

import math
import signal

import numpy as np
import pytest

from tests.aegis.journals import ONE_CRASH, write
from tests.pictures.pages import read
from tests.running import train, train_and_signal
from tests.runs.test_run_data import ODD_LINES, run, step
from zaya_plugin import cli
from zaya_plugin.ground import packages
from zaya_plugin.pictures.content import ALARM, COLOURS
from zaya_plugin.runs.plot import jitter, picture
from zaya_plugin.runs.run_data import read_run

RECIPE = "name: {name}\nmodel: {{name: zaya_tiny}}\nstage: {{train_iters: 100}}\noptim: {{lr: {lr}}}\n"


def full(number):
    """The row of a step with every number that is drawn."""
    more = {"lr": 1e-3, "grad_norm": 2.0, "tokens_per_s": 20_000.0, "mfu": 0.25, "router_entropy": 2.5}
    more |= {"expert_imbalance": 1.5, "expert_imbalance_worst_layer": 3.0, "total_tokens": 4096 * number}
    if number % 10 == 0:
        more["expert_load"] = [[0.5, 0.25, 0.125, 0.125], [0.25] * 4]
    return step(number, **more)


def panels(page):
    return {panel.title: panel for panel in page.panels}


def test_a_supervised_run_has_every_panel(tmp_path):
    rows = [full(number) for number in range(1, 101)]
    rows += [
        {"step": 100, "valid_loss": 6.5, "valid_tokens": 4096, "validation/web/loss": 7.0, "validation/code/loss": 6.0}
    ]
    place = write(tmp_path / "mine", ONE_CRASH)
    page = picture([read_run(run(place, rows, recipe=RECIPE.format(name="demo", lr=1e-3)))])
    drawn = panels(page)
    assert [*drawn] == [
        *("Checkpoints, restarts and faults", "Loss", "Gradient norm", "Learning rate", "Speed", "MFU", "Step time"),
        *("Router entropy", "Expert imbalance", "Validation loss by domain", "Step-time jitter"),
        *("Expert load over layers and steps", "Load of every expert"),
    ]
    assert (page.title, page.notes, page.groups) == ("mine", [], ())
    assert page.lead == ["recipe demo, model zaya_tiny"]
    values = {name: value for name, value, _ in page.figures}
    assert values == {
        "state": "finished",
        "step": "100",
        "loss": "7.0000",
        "validation loss": "6.5000",
        "tokens": "409,600",
        "tokens/s": "20,000",
        "MFU": "25.0 %",
        "step time": "0.5 s",
        "training time": "50.0 s",
    }
    training, validation = drawn["Loss"].layers
    assert [*training.mean] == [8.0 - number / 100 for number in range(1, 101)] and [*validation.mean] == [6.5]
    assert [*drawn["MFU"].layers[0].mean] == [25.0] * 100
    assert drawn["Loss"].marks == [(31, COLOURS[0]), (40, ALARM)]
    marks = {layer.row: layer for layer in drawn["Checkpoints, restarts and faults"].layers}
    assert {row: [*layer.x] for row, layer in marks.items()} == {"checkpoints": [30], "restarts": [31], "faults": [40]}
    assert [layer.name for layer in drawn["Validation loss by domain"].layers] == ["web", "code"]
    (heat,), (table,) = drawn["Expert load over layers and steps"].layers, drawn["Load of every expert"].layers
    np.testing.assert_array_equal(heat.values, [[2.0] * 10, [1.0] * 10])
    np.testing.assert_array_equal(table.values, [[2.0, 1.0, 0.5, 0.5], [1.0] * 4])


def test_what_is_missing_has_a_line_and_no_panel(tmp_path):
    page = picture([read_run(run(tmp_path / "a", [step(1, loss=math.nan), step(2)], recipe=""))])
    assert [*panels(page)] == ["Loss", "Step time"] and page.lead == []
    assert "MFU is left out: metrics.jsonl has no mfu (the recipe has no cluster.peak_tflops)." in page.notes
    assert [note.partition(" is left out")[0] for note in page.notes] == [
        *("Gradient norm", "Learning rate", "Speed", "MFU", "Router entropy", "Expert imbalance"),
        *("Validation loss by domain", "Step-time jitter", "Expert load"),
    ]


def test_an_empty_run_is_a_page_without_panels(tmp_path):
    page = picture([read_run(run(tmp_path / "a"))])
    assert page.panels == [] and page.figures[0][:2] == ("state", "running") and len(page.notes) == 11


def test_runs_are_laid_over_each_other_with_what_differs(tmp_path):
    places = [
        run(tmp_path / name, [full(1), full(2)], recipe=RECIPE.format(name="x", lr=lr))
        for name, lr in (("a", 1), ("b", 2))
    ]
    page = picture([*map(read_run, places)])
    assert page.groups == [("a", COLOURS[0]), ("b", COLOURS[1])] and page.figures == ()
    lines = panels(page)["Expert imbalance"].layers
    assert [(line.name, line.group, line.colour, line.dash) for line in lines] == [
        ("a mean of the layers", 0, COLOURS[0], "solid"),
        ("b mean of the layers", 1, COLOURS[1], "solid"),
        ("a worst layer", 0, COLOURS[0], "dotted"),
        ("b worst layer", 1, COLOURS[1], "dotted"),
    ]
    overview, differing = page.overview
    assert [row[:3] for row in overview.rows] == [("a", "running", "2"), ("b", "running", "2")]
    assert differing.rows == [("optim.lr", "1", "2")] and differing.columns == ("key", "a", "b")


def test_the_jitter_is_the_spread_of_each_window_by_its_median():
    seconds = [*([9.0] * 10), *np.linspace(1, 3, 21)[:20], *([2.0] * 20)]
    steps, shares = jitter(range(1, 51), seconds)
    low, middle, high = np.percentile(seconds[10:30], (5, 50, 95))
    assert [*steps] == [30, 50] and [*shares] == pytest.approx([100 * (high - low) / middle, 0.0])


def test_the_command_writes_a_page_and_a_picture(tmp_path, capsys):
    pytest.importorskip("bokeh")
    run(tmp_path / "m" / "1", [full(1), full(2)])
    run(tmp_path / "m" / "2", [full(1)], tail='{"step": 2, "los')
    assert cli.main(["runs", "plot", str(tmp_path / "m")]) == 0
    assert capsys.readouterr().out == f"written: {tmp_path}/m/runs.html\n"
    assert "2 runs" in read((tmp_path / "m" / "runs.html").read_text()).texts
    run(tmp_path / "empty")
    assert cli.main(["runs", "plot", str(tmp_path / "empty"), "--output", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no"], "RUN=no: does not exist."),
        (["."], "RUN=.: has neither metrics.jsonl nor recipe.yaml."),
        (["a", "--output", "a.svg"], "--output=a.svg: the name of the file has another ending. Allowed: .html, .png."),
        (["a", "--output", "no/a.png"], "its folder does not exist"),
        (["a", *(f"b/{number}" for number in range(20))], "21 runs are too many for one picture"),
    ],
)
def test_mistakes_of_the_user(tmp_path, monkeypatch, capsys, words, says):
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty" if words == ["."] else tmp_path)
    run(tmp_path / "a")
    assert cli.main(["runs", "plot", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.filterwarnings("error")
def test_rows_without_sense_are_drawn_without_them(tmp_path, capsys):
    pytest.importorskip("bokeh")
    nan = {"loss": math.nan, "grad_norm": math.inf, "tokens_per_s": math.inf, "lr": 0.0, "step_s": 0.0}
    ragged = [[[1], [0.5, 0.5]], [[0.5, 0.5]], "x", [], [[]], 3, [[None]]]
    rows = {
        "nan": [step(number, **nan) for number in range(1, 60)],
        "$x_{ <b>": [step(number, expert_load=load) for number, load in enumerate(ragged, 1)],
        "text": [step(number, loss="x", total_tokens="x", eta_s="x", step_s=0.5) for number in range(1, 4)],
        "large": [{"step": 0, "valid_loss": 3.0}, step(1, loss=1e300), step(2, loss=-5)],
    }
    places = [
        run(tmp_path / name, of_run, recipe="name: 7\nstage: {train_iters: many}\nmodel: [1]\ncheckpoint: {path: 3}\n")
        for name, of_run in rows.items()
    ]
    places.append(run(tmp_path / "odd", [step(7)], ODD_LINES))
    assert cli.main(["runs", "plot", *map(str, places), "--output", str(tmp_path / "a.html")]) == 0
    odd = picture([read_run(places[-1])])
    assert {name: value for name, value, _ in odd.figures}["training time"] == "-"
    page = picture([read_run(places[1])])
    np.testing.assert_array_equal(panels(page)["Expert load over layers and steps"].layers[0].values, [[1.0]])
    read((tmp_path / "a.html").read_text())


@pytest.mark.slow
def test_the_restart_of_a_killed_run_is_marked(tmp_path, corpus):
    """A resume drops the rows after its checkpoint, so its first row alone shows where it began."""
    train_and_signal(tmp_path / "run", corpus, signal.SIGKILL, 16, "nproc=1")
    train(tmp_path / "run", corpus, "nproc=1", "resume=auto")
    data = read_run(tmp_path / "run")
    assert (data.state, [*data.metrics.columns["loss"][0]]) == ("finished", [*range(1, 21)])
    marks = [(mark.step, mark.kind) for mark in data.marks]
    assert marks == [(10, "checkpoint"), (11, "restart"), (20, "checkpoint")]


@pytest.mark.parametrize(("library", "name"), [("bokeh", "a.html"), ("matplotlib", "a.png")])
def test_a_missing_library_is_named_before_a_run_is_read(tmp_path, monkeypatch, capsys, library, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(packages, "find_spec", lambda package: None if package == library else object())
    run(tmp_path / "a")
    assert cli.main(["runs", "plot", "a", "--output", name]) == 2
    says = (
        f"pictures: requires the package {library}, which is not installed. Fix: pip install 'zaya_plugin[pictures]'."
    )
    assert says in capsys.readouterr().err
