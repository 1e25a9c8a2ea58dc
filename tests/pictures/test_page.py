# SPDX-License-Identifier: Apache-2.0
"""The HTML page and the PNG: no text becomes markup, nothing is loaded, and every layer of the content is drawn."""

from collections import Counter

import numpy as np
import pytest

from tests.pictures.pages import HOSTILE, read
from zaya_plugin.pictures.content import ALARM, COLOURS, NEUTRAL, Bars, Page, Panel, Points, Table, heat, line


def content(name="run"):
    steps = np.arange(1, 9001)
    lines = [
        line(name, steps, np.sin(steps / 500), COLOURS[0], 100),
        line("b", [5, 9], [1, 2], COLOURS[1], dots=True, group=1),
    ]
    return Page(
        title=name,
        lead=[name, name],
        figures=[(name, name, name)],
        groups=[(name, COLOURS[0]), ("b", COLOURS[1])],
        notes=[name],
        panels=[
            Panel(
                name, "step", lines, name, name, marks=[(7.0, ALARM), (9.0, NEUTRAL)], key=[(name, NEUTRAL, "dashed")]
            ),
            Panel(
                "rows",
                "time",
                [
                    Bars(name, [1, 2], [2, 4], [name, "b"], [NEUTRAL, ALARM]),
                    Points("x", [3], [name], [NEUTRAL], "dash"),
                ],
                rows=[name, "x"],
                wide=True,
            ),
            Panel("logarithmic", "step", [line("c", [1, 2], [1e-3, 1e5], COLOURS[2])], logarithmic=True),
            Panel("heat", "expert", [heat([1, 2], [[1, 2], [3, np.nan]], name)], "layer", zooms=False),
        ],
        overview=[Table(name, (name,), [(name,)], name)],
        tables=[Table("t", ("c",), [("1",)])],
    )


@pytest.fixture(scope="module")
def page():
    pytest.importorskip("bokeh")
    from zaya_plugin.pictures.page import html

    return html(content(HOSTILE))


def models(page, name):
    """The attributes of all Bokeh models of a class."""

    def below(value):
        if isinstance(value, dict):
            if value.get("type") == "object" and value.get("name") == name:
                yield value.get("attributes", {})
            value = [*value.values()]
        for one in value if isinstance(value, list) else ():
            yield from below(one)

    return [*below(page.data)]


def test_no_text_becomes_markup_and_nothing_is_loaded(page):
    elements = read(page)
    assert "\x00" not in page and sum("<script>alert(1)</script>" in each for each in elements.texts) == 16
    assert not [text for attrs, text in elements.scripts if "alert(1)" in text and "type" not in attrs]
    assert len(page) < 1_600_000


def test_every_layer_is_drawn(page):
    page = read(page)
    glyphs = Counter(one["glyph"]["name"] for one in models(page, "GlyphRenderer"))
    assert glyphs == {"VArea": 1, "Line": 5, "Scatter": 2, "HBar": 1, "Image": 1, "VSpan": 2}
    assert [len(models(page, name)) for name in ("LogScale", "ColorBar", "FactorRange")] == [1, 1, 1]
    ranges = [one for one in models(page, "Range1d") if "bounds" in one]
    limits = sorted((one["start"], one["end"]) for one in ranges)
    assert limits == [pytest.approx((-133.31, 9089.31)), pytest.approx((-0.03, 2.03)), pytest.approx((0.955, 4.045))]
    assert sum(bool(one.get("tags")) for one in ranges) == 2  # the experts are not zoomed
    labels = [attrs for tag, attrs in page.elements if tag in ("button", "input")]
    assert all("aria-label" in one or one.get("type") == "checkbox" for one in labels) and len(labels) == 7


def test_the_png_has_all_panels(monkeypatch):
    from zaya_plugin.pictures import still

    drawn = []
    monkeypatch.setattr(
        still, "_panel", lambda axis, panel, limits, draw=still._panel: drawn.append(draw(axis, panel, limits) or axis)
    )
    tables = []
    monkeypatch.setattr(
        still, "_table", lambda place, table, draw=still._table: draw(place, table) or tables.append(place)
    )
    image = still.png(content("<run> $x_{$"))
    (cells,) = tables[0].axes[0].tables
    assert [cells[row, 0].get_text().get_text() for row in (0, 1)] == ["<run> $x_{$"] * 2  # of the tables above alone
    assert image.startswith(b"\x89PNG") and 20_000 < len(image) < 500_000
    assert [len(axis.lines) for axis in drawn] == [4, 0, 1, 0] and [len(axis.images) for axis in drawn] == [0, 0, 0, 1]
    assert [len(axis.patches) for axis in drawn] == [0, 2, 0, 0] and len(drawn[0].collections) == 1
    assert drawn[0].get_xlim() == drawn[2].get_xlim() == pytest.approx((-133.31, 9089.31))
