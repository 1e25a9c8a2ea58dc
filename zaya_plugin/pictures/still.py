# SPDX-License-Identifier: Apache-2.0
"""Draw a picture as a PNG with matplotlib: the tables above the panels and the panels of page.py, two in a row. Bokeh
makes a PNG with a browser only, and a login node has none.
"""

from __future__ import annotations

import io
import os
from typing import Any

from zaya_plugin.pictures.content import Bars, Cells, Line, Page, Panel, Points, Table, x_limits

WIDTH, HEIGHT, ROW_HEIGHT, DPI = 12.8, 2.9, 0.32, 110  # inches of the picture, of a panel, of a row of bars
TABLE_ROW, MAX_ROWS, MAX_CELL = 0.22, 20, 28  # inches of a row of a table, its rows, and characters of a cell
SOFT, GRID = "#56606e", "#d9dee5"  # colours of secondary text and of lines
SHAPES = {"circle": "o", "diamond": "D", "dash": "|"}


def png(page: Page) -> bytes:
    """Return the picture."""
    os.environ["MPLBACKEND"] = "agg"  # the kernel of a notebook hands down a backend that this environment may lack
    import matplotlib

    with matplotlib.rc_context({"text.parse_math": False}):  # names may have a $
        return _drawn(page)


def _drawn(page: Page) -> bytes:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows: list[list[Panel]] = []
    for panel in page.panels:
        if panel.wide or not rows or rows[-1][0].wide or len(rows[-1]) == 2:
            rows.append([panel])
        else:
            rows[-1].append(panel)
    heights = [
        max(ROW_HEIGHT * len(row[0].rows) + 0.9, 1.4) if row[0].rows else 2 * HEIGHT if row[0].ticks else HEIGHT
        for row in rows
    ]
    top = 0.5 + 0.22 * len(page.lead) + 0.5 * bool(page.figures) + 0.3 * bool(page.groups)
    tables = [table for table in page.overview if table.rows]
    heights = [*(TABLE_ROW * (min(len(table.rows), MAX_ROWS) + 1) + 0.5 for table in tables), *heights]
    figure = Figure((WIDTH, sum(heights) + top), dpi=DPI, layout="constrained")
    heading, *places = figure.subfigures(len(heights) + 1, 1, height_ratios=[top, *heights], squeeze=False)[:, 0]
    _heading(heading, page, top)
    for table in tables:
        _table(places.pop(0), table)
    limits = x_limits(page.panels)
    for row, place in zip(rows, places, strict=True):
        axes = place.subplots(1, 1 if row[0].wide else 2, squeeze=False)[0]
        for panel, axis in zip(row, axes, strict=False):
            _panel(axis, panel, limits[panel.x_label])
        for axis in axes[len(row) :]:
            axis.remove()
    out = io.BytesIO()
    FigureCanvasAgg(figure).print_png(out)
    return out.getvalue()


def _heading(place: Any, page: Page, top: float) -> None:
    style: dict[str, Any] = {"va": "top"}
    place.text(0.01, 1 - 0.1 / top, page.title[:110], size=15, weight="bold", **style)
    for number, text in enumerate(page.lead):
        place.text(0.01, 1 - (0.4 + 0.22 * number) / top, text[:160], size=9, color=SOFT, **style)
    y = 0.45 + 0.22 * len(page.lead)
    for number, (name, value, _) in enumerate(page.figures):
        x = 0.01 + 0.98 * number / len(page.figures)
        place.text(x, 1 - y / top, name, size=6.5, color=SOFT, **style)
        place.text(x, 1 - (y + 0.16) / top, value, size=11, weight="bold", **style)
    x = 0.01
    for name, colour in page.groups:
        place.text(x, 1 - y / top, f"■ {name[:40]}", size=9, color=colour, **style)
        x += 0.03 + 0.0075 * len(name[:40])


def _table(place: Any, table: Table) -> None:
    axis = place.subplots()
    axis.axis("off")
    left_out = f" (the first {MAX_ROWS} of {len(table.rows)})" if len(table.rows) > MAX_ROWS else ""
    axis.set_title(table.title + left_out, loc="left", size=10, weight="bold")
    cells = [[cell[:MAX_CELL] for cell in row] for row in (table.columns, *table.rows[:MAX_ROWS])]
    drawn = axis.table(cells, cellLoc="left", bbox=(0, 0, 1, 1))
    drawn.auto_set_font_size(False)
    drawn.set_fontsize(8)
    for (row, _), cell in drawn.get_celld().items():
        cell.set_edgecolor(GRID)
        cell.get_text().set_weight("bold" if row == 0 else "normal")


def _panel(axis: Any, panel: Panel, limits: tuple[float, float]) -> None:
    """Draw a panel over an x axis with these ends."""
    import numpy
    from matplotlib.lines import Line2D
    from matplotlib.ticker import EngFormatter, MaxNLocator, StrMethodFormatter

    axis.set_title(panel.title, loc="left", size=10, weight="bold")
    axis.set_xlabel(panel.x_label, size=8)
    axis.set_ylabel(panel.unit, size=8)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color=GRID, linewidth=0.6)
    axis.set_axisbelow(True)
    rows = {name: place for place, name in enumerate(reversed(panel.rows))}
    if rows:
        axis.set_yticks([*rows.values()], [name[:48] for name in rows])
        axis.set_ylim(-0.6, len(rows) - 0.4)
    elif any(isinstance(layer, Cells) for layer in panel.layers):
        axis.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    elif panel.logarithmic:
        axis.set_yscale("log")
    elif any((numpy.asarray(layer.high) >= 1e4).any() for layer in panel.layers):
        axis.yaxis.set_major_formatter(EngFormatter(sep=""))
    for x, colour in panel.marks:
        axis.axvline(x, color=colour, linewidth=0.8, linestyle="dashed", zorder=1)
    for layer in panel.layers:
        match layer:
            case Line():
                if layer.stride > 1:
                    axis.fill_between(layer.x, layer.low, layer.high, color=layer.colour, alpha=0.25, linewidth=0.6)
                marker = "o" if layer.dots else None
                axis.plot(layer.x, layer.mean, color=layer.colour, ls=layer.dash, lw=1, marker=marker, ms=3)
            case Bars():
                widths = [end - begin for begin, end in zip(layer.begin, layer.end, strict=True)]
                axis.barh([rows[layer.row]] * len(widths), widths, 0.66, layer.begin, color=layer.colours)
            case Points():
                y = [rows[layer.row]] * len(layer.x)
                axis.scatter(layer.x, y, 36, layer.colours, marker=SHAPES[layer.shape], zorder=3)
            case Cells():
                extent = (*layer.x, 0.5, len(layer.values) + 0.5)
                image = axis.imshow(layer.values, "cividis", aspect="auto", origin="lower", extent=extent)
                axis.figure.colorbar(image, ax=axis, label=layer.unit).ax.tick_params(labelsize=8)
                axis.grid(visible=False)
    axis.set_xlim(*limits)
    if panel.ticks:
        axis.set_xticks([*panel.ticks], [*panel.ticks.values()])
        axis.set_ylim(bottom=0)
    else:
        axis.xaxis.set_major_formatter(StrMethodFormatter("{x:,.4g}" if limits[1] < 1000 else "{x:,.0f}"))
    if panel.key:
        lines = [
            Line2D([], [], color=colour, linestyle=dash, marker="o" if dash == "none" else None)
            for _, colour, dash in panel.key
        ]
        look = {"loc": "lower right", "bbox_to_anchor": (1, 1), "fontsize": 7, "frameon": False}
        axis.legend(lines, [name[:40] for name, _, _ in panel.key], ncols=min(8, len(lines)), **look)
