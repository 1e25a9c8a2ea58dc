# SPDX-License-Identifier: Apache-2.0
"""The content of a picture, which page.py draws as one HTML page and still.py as a PNG: panels with layers, figures and
tables. It knows neither runs nor journals, and no library that draws.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

BUCKETS = 4000  # of all lines of a panel together; a screen has fewer columns of pixels
LEAST_BUCKETS = 200  # of one line
HEAT_COLUMNS = 400
MARGIN = 0.015  # of an axis, beyond the data at each end

# Distinguishable with the usual kinds of colour blindness, and each with a contrast of at least 3 on white and on the
# dark page (tests/pictures/test_content.py): Okabe and Ito's blue, vermilion and green, and three that a search added.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#8848ef", "#a8904d", "#855984")
DASHES = ("solid", "dashed", "dotted")
NEUTRAL, ALARM, GOOD = "#7b8794", "#d55e00", "#009e73"  # of bars and marks


@dataclass(frozen=True)
class Table:
    """A table; every cell is text."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


@dataclass(frozen=True)
class Line:
    """A line with the band between the lowest and the highest value of each bucket.

    x, low, mean, high: arrays of one length (`line`). group: the lines that a switch of the page hides together.
    dash: of DASHES, or none for circles alone. dots: every value is a circle too, for lines of few values. stride: the
    most values in a bucket.
    """

    name: str
    x: Any
    low: Any
    mean: Any
    high: Any
    colour: str
    dash: str = "solid"
    group: int = 0
    dots: bool = False
    stride: int = 1


@dataclass(frozen=True)
class Bars:
    """Bars from begin to end in a row of the panel."""

    row: str
    begin: Sequence[float]
    end: Sequence[float]
    texts: Sequence[str]
    colours: Sequence[str]


@dataclass(frozen=True)
class Points:
    """Marks in a row of the panel. shape: circle, diamond or dash."""

    row: str
    x: Sequence[float]
    texts: Sequence[str]
    colours: Sequence[str]
    shape: str = "circle"


@dataclass(frozen=True)
class Cells:
    """A heat map. values: float array [rows, columns], the lowest row first, NaN is empty.

    x: left and right edge. The rows are numbered from 1.
    """

    x: tuple[float, float]
    values: Any
    unit: str


@dataclass
class Panel:
    """A drawing. Panels whose x_label is equal are zoomed together.

    unit: of the y axis. note: one sentence below the title. rows: names of the rows of bars and points, from the top.
    marks: vertical lines, (x, colour) each. key: (name, colour, dash) for the legend. zooms: with the buttons of the
    page. wide: over both columns. ticks: names of places on the x axis; the y axis then begins at 0 (of a PNG alone).
    """

    title: str
    x_label: str
    layers: list[Any]
    unit: str = ""
    note: str = ""
    rows: Sequence[str] = ()
    marks: Sequence[tuple[float, str]] = ()
    logarithmic: bool = False
    key: Sequence[tuple[str, str, str]] = ()
    zooms: bool = True
    wide: bool = False
    ticks: Mapping[float, str] = field(default_factory=dict)


@dataclass
class Page:
    """A whole picture. figures: name, value and meaning. groups: (name, colour) of what a switch hides.

    notes: sentences about the panels, above them. overview: tables above the panels; tables: below.
    """

    title: str
    lead: Sequence[str] = ()
    figures: Sequence[tuple[str, str, str]] = ()
    groups: Sequence[tuple[str, str]] = ()
    panels: list[Panel] = field(default_factory=list)
    overview: Sequence[Table] = ()
    tables: Sequence[Table] = ()
    notes: Sequence[str] = ()


def line(name: str, steps: Any, values: Any, colour: str, buckets: int = BUCKETS, **more: Any) -> Line:
    """Return the line of float values at ascending x, in at most `buckets` points. The lowest and the highest value of
    every bucket are kept exactly, so that a spike of one step stays visible; the mean is that of its finite values.
    """
    import numpy

    x = numpy.asarray(steps, dtype=numpy.float64)
    y = numpy.asarray(values, dtype=numpy.float64)
    y = numpy.where(numpy.isfinite(y), y, numpy.nan)
    if len(x) <= buckets:
        return Line(name, x, y, y, y, colour, **more)
    edges = numpy.arange(buckets + 1) * len(x) // buckets
    first, is_number = edges[:-1], numpy.isfinite(y)
    count = numpy.add.reduceat(is_number, first, dtype=numpy.int64)
    with numpy.errstate(invalid="ignore"):  # a bucket without a finite value
        mean = numpy.add.reduceat(numpy.where(is_number, y, 0.0), first) / count
    low, high = numpy.fmin.reduceat(y, first), numpy.fmax.reduceat(y, first)
    stride = int(numpy.diff(edges).max())
    return Line(name, x[(first + edges[1:] - 1) // 2], low, mean, high, colour, stride=stride, **more)


def heat(steps: Sequence[int], values: Any, unit: str) -> Cells:
    """Return the heat map of `values` [steps, rows] over equal stretches of steps: the highest value of each
    stretch, which ends at its step.

    steps: ascending, at least one.
    """
    import numpy

    at, values = numpy.asarray(steps, dtype=numpy.float64), numpy.asarray(values, dtype=numpy.float64)
    width = float(numpy.percentile(numpy.diff(at), 50, method="lower")) if len(at) > 1 else 1.0
    stretches = round((at[-1] - at[0]) / width) + 1
    columns = min(HEAT_COLUMNS, stretches)
    place = (((at - at[0]) / width + 0.5) * columns / stretches).astype(int).clip(0, columns - 1)
    cells = numpy.full((columns, values.shape[1]), -numpy.inf)
    numpy.maximum.at(cells, place, values)
    return Cells(
        (at[0] - width, at[0] + (stretches - 1) * width), numpy.where(cells == -numpy.inf, numpy.nan, cells).T, unit
    )


def x_limits(panels: Sequence[Panel]) -> dict[str, tuple[float, float]]:
    """Return for each x_label the ends of its axis, with a margin."""
    ends: dict[str, list[float]] = {}
    for panel in panels:
        ends.setdefault(panel.x_label, []).extend(_extent(panel))
    limits = {}
    for label, places in ends.items():
        least, most = min(places, default=0.0), max(places, default=1.0)
        most = most if most > least else least + 1.0
        limits[label] = (least - MARGIN * (most - least), most + MARGIN * (most - least))
    return limits


def _extent(panel: Panel) -> list[float]:
    ends: list[float] = [x for x, _ in panel.marks]
    for layer in panel.layers:
        match layer:
            case Line():
                ends += [float(layer.x[0]), float(layer.x[-1])] if len(layer.x) else []
            case Points():
                ends += layer.x
            case Bars():
                ends += [*layer.begin, *layer.end]
            case Cells():
                ends += layer.x
    return ends
