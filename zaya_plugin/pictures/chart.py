# SPDX-License-Identifier: Apache-2.0
"""Draw line charts with matplotlib, which the extra `pictures` installs. `python -m zaya_plugin.pictures.chart
hbm.json` draws hbm.png from a record of `zaya bench`, as the command does.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PREFIXES = ("", "Ki", "Mi", "Gi", "Ti")  # powers of 1024
MOST_TICKS = 10  # more would overlap
# Okabe and Ito's palette for the colour-blind.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#882255")
MARKERS = "osD^vPX*"


@dataclass(frozen=True)
class Line:
    """One line of a chart: its name in the legend, and its points; joined: by a line."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    joined: bool = True


def bytes_text(number: float) -> str:
    """Return a number of bytes with a binary prefix: 65536 is "64 KiB"."""
    power = 0
    while number >= 1024 and power < len(PREFIXES) - 1:
        number, power = number / 1024, power + 1
    return f"{number:.4g} {PREFIXES[power]}B"


def save_lines(
    path: Path, title: str, lines: Sequence[Line], x: str, y: str, limit: tuple[str, float] | None = None
) -> None:
    """Write a PNG of `lines` over a logarithmic axis of base 2.

    x, y: titles of the axes; where `x` names bytes its ticks have binary prefixes. limit: name and height of a dashed
    line. Raises ImportError without matplotlib.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((9, 5.4), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for number, line in enumerate(lines):
        look = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 4}
        axes.plot(line.x, line.y, linestyle="-" if line.joined else "none", label=line.name, **look)
    if limit is not None:
        axes.axhline(limit[1], color="#666666", linestyle="--", label=f"{limit[0]}: {limit[1]:.4g}")
    axes.set_xscale("log", base=2)
    powers = [math.log2(place) for line in lines for place in line.x]
    low, high = math.floor(min(powers)), math.ceil(max(powers))
    ticks = [2.0**power for power in range(low, high + 1, math.ceil((high - low + 1) / MOST_TICKS))]
    names = [
        bytes_text(place) if "byte" in x else f"{place:,.0f}" if place >= 1000 else f"{place:.3g}" for place in ticks
    ]
    axes.set_xticks(ticks, names)
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(color="#dddddd")
    axes.legend()
    figure.savefig(path)


def save_of_record(path: Path) -> Path:
    """Draw the picture of a record of `zaya bench` next to it, and return its path."""
    picture = json.loads(path.read_text())["picture"]
    lines = [Line(**line) for line in picture.pop("lines")]
    save_lines(path.with_suffix(".png"), lines=lines, **picture)
    return path.with_suffix(".png")


if __name__ == "__main__":
    for record in sys.argv[1:]:
        print(save_of_record(Path(record)))
