# SPDX-License-Identifier: Apache-2.0
"""Charts of lines over powers of two, as PNGs. `python -m zaya_plugin.pictures.chart hbm.json` draws hbm.png from a record
of `zaya bench`, as the command does.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from zaya_plugin.pictures import content
from zaya_plugin.pictures.still import png

PREFIXES = ("", "Ki", "Mi", "Gi", "Ti")  # powers of 1024
MOST_TICKS = 10  # more would overlap


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
    """Write a PNG of `lines` over a logarithmic axis of base 2 and a linear one from 0.

    x, y: titles of the axes; where `x` names bytes its ticks have binary prefixes. limit: name and height of a dashed
    line. Raises ImportError without matplotlib.
    """
    powers = [math.log2(place) for line in lines for place in line.x]
    low, high = math.floor(min(powers)), math.ceil(max(powers))
    ticks = {power: 2.0**power for power in range(low, high + 1, math.ceil((high - low + 1) / MOST_TICKS))}
    named = [(line.name, [*map(math.log2, line.x)], line.y, "solid" if line.joined else "none") for line in lines]
    if limit is not None:
        named.append((f"{limit[0]}: {limit[1]:.4g}", [min(powers), max(powers)], [limit[1]] * 2, "dashed"))
    colours = [content.COLOURS[number % len(content.COLOURS)] for number in range(len(lines))] + [content.NEUTRAL]
    panel = content.Panel(
        "",
        x,
        [
            content.Line(name, places, values, values, values, colour, dash, dots=dash != "dashed")
            for (name, places, values, dash), colour in zip(named, colours, strict=False)
        ],
        unit=y,
        key=[(name, colour, dash) for (name, *_, dash), colour in zip(named, colours, strict=False)],
        wide=True,
        ticks={
            power: bytes_text(place) if "byte" in x else f"{place:,.0f}" if place >= 1000 else f"{place:.3g}"
            for power, place in ticks.items()
        },
    )
    path.write_bytes(png(content.Page(title, panels=[panel])))


def save_of_record(path: Path) -> Path:
    """Draw the picture of a record of `zaya bench` next to it, and return its path."""
    picture = json.loads(path.read_text())["picture"]
    lines = [Line(**line) for line in picture.pop("lines")]
    save_lines(path.with_suffix(".png"), lines=lines, **picture)
    return path.with_suffix(".png")


if __name__ == "__main__":
    for record in sys.argv[1:]:
        print(save_of_record(Path(record)))
