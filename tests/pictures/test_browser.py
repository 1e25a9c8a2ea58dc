# SPDX-License-Identifier: Apache-2.0
"""The pages in a real browser: nothing is requested, nothing goes wrong, nothing is wider than a phone, a million steps
open in time, keys and switches work. The pictures are written to SCREENSHOTS where it is set, for a person to look at.
"""

import json
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest

from tests.aegis.journals import ONE_CRASH, account_of, write
from tests.pictures.browser import Browser
from tests.runs.test_plot import RECIPE, full
from tests.runs.test_run_data import run
from zaya_plugin.aegis.page import page as report
from zaya_plugin.runs.plot import picture
from zaya_plugin.runs.run_data import read_run

pytestmark = pytest.mark.slow
SIZES = [(1280, False), (1280, True), (390, False), (390, True)]


@pytest.fixture(scope="module")
def browser(require_tool, tmp_path_factory):
    pytest.importorskip("bokeh")
    opened = Browser(require_tool("chromium-headless-shell"), tmp_path_factory.mktemp("browser"))
    yield opened
    opened.close()


def save(content, path):
    from zaya_plugin.pictures.page import html

    path.write_text(html(content))
    return path


def pixels(path):
    from PIL import Image

    with open(path, "rb") as file:
        return np.asarray(Image.open(file).convert("L"), dtype=int)


def contents(folder):
    """The pages that are looked at: a supervised run, three runs over each other, a report."""
    places = []
    for number in range(3):
        rows = [
            full(step) | {"loss": 2 + 6 * math.exp(-step / 30) + number / 9, "mfu": 0.3 + number / 50}
            for step in range(1, 101)
        ]
        rows.append({"step": 100, "valid_loss": 2.5 + number, "validation/web/loss": 2.0, "validation/code/loss": 3.0})
        place = write(folder / f"run{number}", ONE_CRASH)
        places.append(run(place, rows, recipe=RECIPE.format(name="demo", lr=number)))
    return {
        "run": picture([read_run(places[0])]),
        "runs": picture([*map(read_run, places)]),
        "report": report(account_of(ONE_CRASH), "run"),
    }


def test_pages_fit_and_load_nothing(browser, tmp_path):
    pictures = Path(os.environ.get("SCREENSHOTS", tmp_path))
    for name, content in contents(tmp_path).items():
        page = save(content, tmp_path / f"{name}.html")
        for width, dark in SIZES:
            browser.open(page, width, dark)
            assert browser.value("document.documentElement.scrollWidth") == width, name
            assert browser.errors == [] and browser.requests == [], name
            assert browser.value("Bokeh.documents[0].roots().length") == len(content.panels)
            back = browser.value("getComputedStyle(document.body).backgroundColor")
            assert back == ("rgb(20, 24, 29)" if dark else "rgb(255, 255, 255)")
            shot = pictures / f"{name}-{width}-{'dark' if dark else 'light'}.png"
            browser.save(shot)
            assert shot.stat().st_size > 20_000
            browser.choose(not dark)  # the charts follow without loading the page again
            browser.value(
                "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 100))))"
            )
            browser.save(tmp_path / f"{name}-{width}-{'light' if dark else 'dark'}.png.switched")
            assert browser.errors == []
        for switched in tmp_path.glob(f"{name}-*.switched"):
            ours, theirs = (pixels(path) for path in (switched, pictures / switched.stem))
            assert (abs(ours - theirs) > 20).mean() < 1e-3, switched.stem


def test_a_forbidden_script_and_a_request_are_noticed(browser, tmp_path):
    """The page before shows that its checks can fail: a script of its text runs nowhere, and is an error."""
    page = save(contents(tmp_path)["report"], tmp_path / "report.html")
    text = page.read_text().replace("</main>", "<script>window.bad = 1</script><img src='//localhost/x.png'></main>")
    page.write_text(text.replace("<p>zaya train</p>", f"<p>{'x' * 100}</p><pre>{'x' * 500}</pre>"))
    browser.open(page, 390)
    assert browser.value("window.bad") is None and len(browser.errors) >= 2
    assert browser.value("document.documentElement.scrollWidth") > 390


def test_keys_buttons_and_switches(browser, tmp_path):
    page = save(contents(tmp_path)["runs"], tmp_path / "runs.html")
    browser.open(page, 1280)
    chart = "Bokeh.documents[0].roots().find((root) => root.x_range.tags.length)"
    width = f"(() => {{ const x = {chart}.x_range; return [x.start, x.end] }})()"
    least, most = browser.value(width)
    assert (least, most) == pytest.approx((-1, 101), abs=1.1)
    browser.press("+")
    zoomed = browser.value(width)
    assert zoomed[1] - zoomed[0] == pytest.approx((most - least) / 2)
    browser.press("ArrowRight")
    assert browser.value(width)[0] == pytest.approx(zoomed[0] + (most - least) / 8)
    loss = "Bokeh.documents[0].roots().find((root) => root.yaxis?.axis_label == 'nats a token' || root.left?.[0]?.axis_label == 'nats a token').y_range"
    heights = f"(() => {{ const y = {loss}; return [y.start, y.end] }})()"
    before = browser.value(heights)
    browser.value(f"{loss}.setv({{start: 0, end: 1}})")  # as a box that is dragged does
    browser.value("document.querySelector('button[data-key=\"0\"]').click()")
    assert browser.value(heights) == pytest.approx(before)
    assert browser.value(width) == pytest.approx([least, most])
    browser.value("document.querySelector('input[data-group=\"1\"]').click()")
    hidden = "Bokeh.documents[0].roots().flatMap((root) => root.renderers).filter((one) => one.tags.includes('{}') && one.visible).length"
    assert browser.value(hidden.format(1)) == 0 < browser.value(hidden.format(0))
    names = [browser.press("Tab") or browser.value("document.activeElement.tagName") for _ in range(12)]
    assert names.count("BUTTON") == 5 and names.count("INPUT") == 3
    assert browser.errors == []


def test_a_million_steps_open_in_three_seconds(browser, tmp_path):
    place, chance = tmp_path / "long", random.Random(1)
    run(place, recipe="stage: {train_iters: 1000000}\n")
    spikes = {*chance.sample(range(1, 1_000_001), 40)}
    template = (
        json.dumps(full(0) | {"expert_load": None})
        .replace('"step": 0', '"step": %d', 1)
        .replace('"loss": 8.0', '"loss": %.4f', 1)
    )
    with open(place / "metrics.jsonl", "w") as file:
        for number in range(1, 1_000_001):
            loss = 2 + 6 * math.exp(-number / 1e5) + chance.random() / 10 + 5 * (number in spikes)
            if number % 10_000:
                file.write(template % (number, loss) + "\n")
            else:
                file.write(json.dumps(full(10) | {"step": number, "loss": loss}) + "\n")
    content = picture([read_run(place)])
    loss = next(panel for panel in content.panels if panel.title == "Loss").layers[0]
    assert (
        sum(float(high) > 6.9 for high, x in zip(loss.high, loss.x, strict=True) if x > 500_000)
        >= sum(spike > 500_250 for spike in spikes) - 2
    )
    page = save(content, tmp_path / "long.html")
    assert page.stat().st_size < 6_000_000
    browser.open(page, 1280)
    assert browser.seconds < 3
    assert browser.errors == []
    browser.save(Path(os.environ.get("SCREENSHOTS", tmp_path)) / "million-1280-light.png")
