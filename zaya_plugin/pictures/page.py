# SPDX-License-Identifier: Apache-2.0
"""Draw a picture as one HTML page with Bokeh. The page holds its scripts and data and loads nothing: its policy forbids
the network and every script but its own two, by their hashes, because names and log lines can hold anything.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from zaya_plugin.pictures.content import NEUTRAL, Bars, Cells, Line, Page, Panel, Points, Table, x_limits

TEXT = [("", "@text")]
ABBREVIATED = 1e4  # the least value of an axis that is written as 10k
TICK_COLOUR = "#737f8c"  # readable on light and on dark; Bokeh reads no CSS variable here
HEIGHT, ROW_HEIGHT, LEFT = 260, 34, 74  # pixels of a panel, of a row of bars, and left of the axis
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src {}"
CONTROLS = (
    ("-", "−", "zoom out (key -)"),
    ("+", "+", "zoom in (key +)"),
    ("ArrowLeft", "←", "earlier (left arrow)"),
    ("ArrowRight", "→", "later (right arrow)"),
    ("0", "all", "the whole run (key 0)"),
)


def html(page: Page) -> str:
    """Return the page."""
    from bokeh.document import Document
    from bokeh.embed.util import standalone_docs_json_and_render_items
    from bokeh.resources import Resources

    charts = _charts(page.panels)
    data, places = "", [""] * len(charts)
    if charts:
        document = Document()
        for chart in charts:
            document.add_root(chart)
        documents, (item,) = standalone_docs_json_and_render_items(document)
        data = json.dumps([documents, [item.to_json()]]).replace("<", "\\u003c")
        places = [
            f'<div id="{root.elementid}" data-root-id="{root.id}" style="display: contents"></div>'
            for root in item.roots
        ]
    scripts = [
        *Resources(mode="inline", components=["bokeh"], log_level="fatal").js_raw,
        files("zaya_plugin.pictures").joinpath("page.js").read_text(),
    ]
    style = files("zaya_plugin.pictures").joinpath("page.css").read_text()
    policy = POLICY.format(" ".join(f"'sha256-{_digest(script)}'" for script in scripts))
    parts = [
        "<!DOCTYPE html>",
        f'<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{_text(page.title)}</title><style>{style}</style></head><body>",
        f"<header><h1>{_text(page.title)}</h1>{''.join(f'<p>{_text(line)}</p>' for line in page.lead)}</header><main>",
        _figures(page.figures),
        *map(_table, page.overview),
        *(_controls(page) if any(panel.zooms for panel in page.panels) else ()),
        *(f"<p>{_text(line)}</p>" for line in page.notes),
        '<div class="panels">',
        *(_panel(panel, place) for panel, place in zip(page.panels, places, strict=True)),
        "</div>",
        *map(_table, page.tables),
        f'</main><script type="application/json" id="data">{data}</script>',
        *(f"<script>{script}</script>" for script in scripts),
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def _text(value: Any) -> str:
    """Return `value` as text of the page, without control characters."""
    return escape("".join(letter if letter.isprintable() else " " for letter in str(value)), quote=True)


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _figures(figures: Sequence[tuple[str, str, str]]) -> str:
    boxes = "".join(
        f"<div><dt>{_text(name)}</dt><dd><b>{_text(value)}</b><span>{_text(meaning)}</span></dd></div>"
        for name, value, meaning in figures
    )
    return f"<dl>{boxes}</dl>" if boxes else ""


def _controls(page: Page) -> Iterable[str]:
    yield '<div class="bar"><span>'
    for key, sign, title in CONTROLS:
        yield f'<button type="button" data-key="{key}" title="{title}" aria-label="{title}">{sign}</button>'
    yield "</span>"
    for number, (name, colour) in enumerate(page.groups):
        box = f'<input type="checkbox" checked data-group="{number}">' if len(page.groups) > 1 else ""
        yield f'<label>{box}<i class="box" style="background:{colour}"></i>{_text(name)}</label>'
    yield "</div>"


def _panel(panel: Panel, place: str) -> str:
    key = "".join(
        f'<li><i style="border-color:{colour};border-top-style:{dash}"></i>{_text(name)}</li>'
        for name, colour, dash in panel.key
    )
    note = f"<p>{_text(panel.note)}</p>" if panel.note else ""
    legend = f'<ul class="key">{key}</ul>' if key else ""
    wide = ' class="wide"' if panel.wide else ""
    return f"<figure{wide}><figcaption><h3>{_text(panel.title)}</h3>{note}{legend}</figcaption>{place}</figure>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{_text(column)}</th>" for column in table.columns)
    rows = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
    note = f"<p>{_text(table.note)}</p>" if table.note else ""
    return (
        f'<h2>{_text(table.title)}</h2>{note}<div class="scroll" tabindex="0" role="region" '
        f'aria-label="{_text(table.title)}"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    )


def _charts(panels: Sequence[Panel]) -> list[Any]:
    """Return the figures of Bokeh; those of one x axis share its range, whose tags are its limits if it zooms."""
    from bokeh.models import Range1d, Span

    ranges = {}
    for label, (least, most) in x_limits(panels).items():
        ranges[label] = Range1d(least, most, bounds=(least, most))
        if all(panel.zooms for panel in panels if panel.x_label == label):
            ranges[label].tags = [least, most]
    crosshairs = {label: Span(dimension="height", line_color=NEUTRAL, line_dash="dotted") for label in ranges}
    return [_chart(panel, ranges[panel.x_label], crosshairs[panel.x_label]) for panel in panels]


def _chart(panel: Panel, x_range: Any, crosshair: Any) -> Any:
    import numpy
    from bokeh.models import (
        BasicTicker,
        BasicTickFormatter,
        CrosshairTool,
        FactorRange,
        HoverTool,
        NumeralTickFormatter,
    )
    from bokeh.plotting import figure

    height, more = HEIGHT, {"y_axis_type": "log"} if panel.logarithmic else {}
    heats = [layer for layer in panel.layers if isinstance(layer, Cells)]
    if panel.rows:
        height, more = ROW_HEIGHT * len(panel.rows) + 56, {"y_range": FactorRange(factors=[*reversed(panel.rows)])}
    elif heats:
        more = {"y_range": (0.5, len(heats[0].values) + 0.5)}
    chart = figure(
        height=height,
        sizing_mode="stretch_width",
        x_range=x_range,
        x_axis_label=panel.x_label,
        y_axis_label=panel.unit or None,
        tools="box_zoom",
        toolbar_location=None,
        min_border_left=LEFT,
        **more,
    )
    chart.xaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    chart.axis.axis_label_text_font_style = "normal"
    chart.grid.visible = not heats
    if heats:
        chart.yaxis.ticker = BasicTicker(min_interval=1)
    elif panel.rows:
        chart.ygrid.visible = False
    else:
        values = [numpy.asarray(layer.high, dtype=float) for layer in panel.layers]
        most = float(numpy.nanmax(numpy.concatenate(values), initial=0.0)) if values else 0.0
        chart.y_range.only_visible = True
        chart.y_range.default_span = 0.2 * most or 1.0  # of a line of one value
        if not panel.logarithmic:
            short, plain = NumeralTickFormatter(format="0.[00]a"), BasicTickFormatter(power_limit_low=-6)
            chart.yaxis.formatter = short if most >= ABBREVIATED else plain
    for colour in dict.fromkeys(colour for _, colour in panel.marks):
        places = [x for x, mark in panel.marks if mark == colour]
        chart.vspan(x=places, line_color=colour, line_alpha=0.8, line_dash="dashed")
    # One tool shows the values of all layers of its kind: (renderers, the rows of its text).
    tools: dict[tuple, list[Any]] = {}
    for layer in panel.layers:
        drawn, rows = DRAWERS[type(layer)](chart, layer)
        tools.setdefault((isinstance(layer, Line), *rows), []).append(drawn)
    for (is_line, *rows), drawn in tools.items():
        mode = {"mode": "vline", "line_policy": "nearest"} if is_line else {}
        chart.add_tools(HoverTool(renderers=drawn, tooltips=rows, **mode))
    chart.add_tools(CrosshairTool(overlay=crosshair))
    return chart


def _line(chart: Any, line: Line) -> tuple[Any, list[tuple[str, str]]]:
    """Draw a layer; return what the pointer is to find, and the rows of the text that it shows."""
    from bokeh.models import ColumnDataSource

    data = {"x": line.x, "mean": line.mean}
    values, drawn = [("value", "@mean")], []
    if line.stride > 1:
        data |= {"low": line.low, "high": line.high}
        values = [("mean", "@mean"), ("lowest", "@low"), ("highest", "@high")]
    source = ColumnDataSource(data)
    if line.stride > 1:
        drawn.append(chart.varea("x", "low", "high", source=source, fill_color=line.colour, fill_alpha=0.25))
        # The outline shows a spike of one step, which is a fraction of a pixel wide.
        drawn += [chart.line("x", y, source=source, color=line.colour, line_alpha=0.5) for y in ("low", "high")]
    drawn.append(chart.line("x", "mean", source=source, color=line.colour, line_dash=line.dash, line_width=1.6))
    if line.dots:
        drawn.append(chart.scatter("x", "mean", source=source, color=line.colour, size=6))
    for one in drawn:
        one.name, one.tags = line.name, [str(line.group)]
    return drawn[-1], [("", "$name"), (chart.xaxis.axis_label, "@x{0,0.[00]}"), *values]


def _bars(chart: Any, bars: Bars) -> tuple[Any, list[tuple[str, str]]]:
    from bokeh.core.properties import value
    from bokeh.models import ColumnDataSource

    source = ColumnDataSource({"left": bars.begin, "right": bars.end, "text": bars.texts, "colour": bars.colours})
    drawn = chart.hbar(
        value(bars.row), left="left", right="right", height=0.66, color="colour", line_color=None, source=source
    )
    return drawn, TEXT


def _points(chart: Any, points: Points) -> tuple[Any, list[tuple[str, str]]]:
    from bokeh.core.properties import value
    from bokeh.models import ColumnDataSource

    source = ColumnDataSource({"x": points.x, "text": points.texts, "colour": points.colours})
    look = {"size": 16, "angle": 1.5708} if points.shape == "dash" else {"size": 11}
    drawn = chart.scatter(
        "x", value(points.row), source=source, marker=points.shape, color="colour", line_width=2, **look
    )
    return drawn, TEXT


def _cells(chart: Any, cells: Cells) -> tuple[Any, list[tuple[str, str]]]:
    import numpy
    from bokeh.models import ColorBar, LinearColorMapper
    from bokeh.palettes import Cividis256

    finite = cells.values[numpy.isfinite(cells.values)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    mapper = LinearColorMapper(Cividis256, low=low, high=max(high, low + 1e-9), nan_color="rgba(0,0,0,0)")
    left, right = cells.x
    drawn = chart.image(
        image=[cells.values.astype(numpy.float32)],
        x=left,
        y=0.5,
        dw=right - left,
        dh=len(cells.values),
        color_mapper=mapper,
    )
    bar = ColorBar(color_mapper=mapper, width=10, background_fill_alpha=0, major_label_text_color=TICK_COLOUR)
    chart.add_layout(bar, "right")
    label = chart.xaxis.axis_label
    return drawn, [(label, "$x{0,0}"), (chart.yaxis.axis_label, "$y{0}"), (cells.unit, "@image{0.00}")]


DRAWERS = {Line: _line, Bars: _bars, Points: _points, Cells: _cells}
