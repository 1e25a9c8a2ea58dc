# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML page: figures, a timeline as inline SVG, tables. Without scripts and network; its policy
forbids both, and every text is escaped, because log lines can hold anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from zaya_plugin.aegis.account import END, START, TRAINING, Account, Failure, Span
from zaya_plugin.aegis.diagnose.evidence import printable

WIDTH, LEFT, RIGHT = 1000, 84, 14  # of the timeline, and its margins
USE_Y, ATTEMPT_Y, FAULT_Y, CHECKPOINT_Y, STEPS_Y, STEPS_HEIGHT, BAR = 18, 56, 94, 152, 178, 120, 22
FAULT_ROWS, FAULT_SIZE = 3, 9  # marks that would touch go to the next row; radius of a mark
AXIS_Y = STEPS_Y + STEPS_HEIGHT
HEIGHT = AXIS_Y + 34
NARROW = 0.4  # spans and ticks below this many units are joined with their neighbours
TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800)
COLOURS = 6  # of causes; further ones share the last colour

STYLE = """
:root{color-scheme:light dark;--text:#1d2530;--soft:#5b6675;--line:#d5dae1;--back:#fff;--panel:#f5f7f9;
--training:#2f8f6b;--start:#a9b4c2;--end:#ccd3db;--c0:#c0392b;--c1:#d98a00;
--c2:#2471b5;--c3:#8e44ad;--c4:#6b7a00;--c5:#7a5c4a}
@media(prefers-color-scheme:dark){:root{--text:#e4e8ed;--soft:#9aa5b3;--line:#39424e;--back:#14181d;--panel:#1d232a;
--training:#3fae85;--start:#5d6875;--end:#444d58;--c0:#e8695c;--c1:#e8a93c;
--c2:#5fa8e6;--c3:#bf86da;--c4:#aab83a;--c5:#b8937d}}
body{margin:0 auto;max-width:1100px;padding:24px;background:var(--back);color:var(--text);
font:15px/1.5 system-ui,sans-serif}
h1{font-size:22px;margin:0}h2{font-size:17px;margin:32px 0 8px}p{margin:4px 0;color:var(--soft)}
code{font:13px/1.4 ui-monospace,monospace;overflow-wrap:anywhere}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(230px,1fr));gap:10px;margin:20px 0}
dl div{background:var(--panel);border-radius:6px;padding:10px 12px}
dt{color:var(--soft);font-size:13px}dd{margin:0}dd b{font-size:20px;font-weight:600;display:block}
dd span{font-size:12px;color:var(--soft)}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:13px;min-width:100%}
th,td{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:500;white-space:nowrap}td{font-variant-numeric:tabular-nums;overflow-wrap:anywhere;
min-width:3ch;max-width:46ch}
svg{width:100%;min-width:640px;height:auto;display:block}
svg text{fill:var(--soft);font:12px system-ui,sans-serif}svg .number{fill:var(--back);font-size:11px;text-anchor:middle}
.legend{font-size:13px;color:var(--soft);display:flex;flex-wrap:wrap;gap:4px 18px;margin-top:8px}
.legend i{display:inline-block;width:11px;height:11px;border-radius:2px;margin-right:6px}
.training{fill:var(--training);background:var(--training)}.start{fill:var(--start);background:var(--start)}
.end{fill:var(--end);background:var(--end)}
.attempt{fill:var(--panel);stroke:var(--soft)}.grid{stroke:var(--line)}.pause{stroke:var(--soft);stroke-dasharray:4 3}
.steps{fill:none;stroke:var(--training);stroke-width:1.6}.lost{stroke:var(--c0)}.checkpoint{stroke:var(--soft)}
""" + "".join(f".c{i}{{fill:var(--c{i});background:var(--c{i})}}" for i in range(COLOURS))


def text(value: Any) -> str:
    """Return `value` as text of the page."""
    return escape(printable(str(value)), quote=True)


class Timeline:
    """The drawing. Its x axis has the seconds of the account."""

    def __init__(self, account: Account):
        self.account = account
        self.seconds = max(account.seconds, 1.0)
        causes = [row["cause"] for row in account.by_cause()]
        self.colours = {cause: f"c{min(number, COLOURS - 1)}" for number, cause in enumerate(causes)}

    def x(self, time: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * min(max(time / self.seconds, 0.0), 1.0), 2)

    def kind(self, use: str | Failure) -> str:
        """Return the class of a use of time."""
        if isinstance(use, Failure):
            return self.colours[use.cause]
        return {TRAINING: "training", START: "start", END: "end"}[use]

    def svg(self) -> str:
        """Return the drawing as an element of the page."""
        labels = (
            (USE_Y, "time"),
            (ATTEMPT_Y, "attempts"),
            (FAULT_Y, "failures"),
            (CHECKPOINT_Y - 8, "checkpoints"),
            (STEPS_Y + 40, "steps"),
        )
        parts = [
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="timeline of the run">',
            *(f'<text x="0" y="{y + 15}">{name}</text>' for y, name in labels),
            *self.axis(),
            *self.uses(),
            *self.attempts(),
            *self.steps(),
            *self.checkpoints(),
            *self.failures(),
            "</svg>",
        ]
        return "\n".join(parts)

    def axis(self) -> Iterable[str]:
        step = next((tick for tick in TICKS if self.seconds / tick <= 10), self.seconds)
        for number in range(int(self.seconds // step) + 1):
            x = self.x(number * step)
            yield f'<line class="grid" x1="{x}" x2="{x}" y1="{USE_Y}" y2="{AXIS_Y}"/>'
            yield f'<text x="{x}" y="{AXIS_Y + 18}" text-anchor="middle">{_clock(number * step, step)}</text>'
        for time in self.account.pauses:
            x = self.x(time)
            yield f'<line class="pause" x1="{x}" x2="{x}" y1="{USE_Y - 12}" y2="{AXIS_Y}">'
            yield "<title>the run had ended, and a person started it again</title></line>"

    def uses(self) -> Iterable[str]:
        for begin, end, use in _joined(self.account.spans, NARROW * self.seconds / (WIDTH - LEFT - RIGHT)):
            name = f"{use.cause} on {use.node or 'no node'}" if isinstance(use, Failure) else use
            yield _bar(self.x(begin), self.x(end), USE_Y, self.kind(use), f"{name}: {end - begin:,.1f} s")

    def attempts(self) -> Iterable[str]:
        for one in self.account.attempts:
            left, right = self.x(one.start), self.x(one.end)
            title = f"attempt {one.generation}: {one.world_size} ranks on {' '.join(one.nodes[:8])}"
            yield _bar(left, right, ATTEMPT_Y, "attempt", title)
            if right - left > 7 * len(str(one.generation)) + 8:
                yield f'<text x="{left + 4}" y="{ATTEMPT_Y + 15}">{one.generation}</text>'

    def failures(self) -> Iterable[str]:
        free = [float("-inf")] * FAULT_ROWS  # where each row's last mark ends
        for number, one in enumerate(self.account.failures, 1):
            x = min(max(self.x(one.time), LEFT + FAULT_SIZE), WIDTH - FAULT_SIZE)
            row = next((i for i in range(FAULT_ROWS) if free[i] <= x - FAULT_SIZE), free.index(min(free)))
            free[row] = x + FAULT_SIZE
            y = FAULT_Y + 11 + row * 19
            what = f"{number}: {one.cause} on {one.node or 'no node'}, {one.action or 'no decision'}. {one.reason}"
            yield f'<g><title>{text(what)}</title><circle class="{self.kind(one)}" cx="{x}" cy="{y}" r="{FAULT_SIZE}"/>'
            yield f'<text class="number" x="{x}" y="{y + 4}">{number}</text></g>'

    def checkpoints(self) -> Iterable[str]:
        last = float("-inf")
        for time, step in self.account.checkpoints:
            if (x := self.x(time)) - last >= 2:
                last = x
                yield f'<line class="checkpoint" x1="{x}" x2="{x}" y1="{CHECKPOINT_Y}" y2="{CHECKPOINT_Y + 12}">'
                yield f"<title>checkpoint of step {step:,}</title></line>"

    def steps(self) -> Iterable[str]:
        most = max((one.last_step for one in self.account.attempts if one.points), default=0.0)
        least = min((one.base for one in self.account.attempts if one.points), default=0.0)

        def y(step: float) -> float:
            share = (step - least) / (most - least) if most > least else 0.0
            return round(AXIS_Y - share * (STEPS_HEIGHT - 10), 2)

        for one in self.account.attempts:
            if not one.points:
                continue
            kept = max(min(one.kept, one.last_step), one.base)
            edge = (one.time_at(kept), kept)
            for kind, points in (
                ("steps lost", [edge, *(point for point in one.points if point[1] > kept)]),
                ("steps", [*(point for point in one.points if point[1] < kept), edge]),
            ):
                if len(points) > 1:
                    dots = " ".join(
                        f"{self.x(time)},{y(step)}" for time, step in _thinned(points, self.seconds / WIDTH)
                    )
                    yield f'<polyline class="{kind}" points="{dots}"/>'
        if most > least:
            yield f'<text x="{LEFT - 6}" y="{STEPS_Y + 14}" text-anchor="end">{most:,.0f}</text>'
            yield f'<text x="{LEFT - 6}" y="{AXIS_Y}" text-anchor="end">{least:,.0f}</text>'

    def legend(self) -> str:
        names = [("training", TRAINING), ("start", START), ("end", END)]
        shared: dict[str, list[str]] = {}
        for cause, kind in self.colours.items():
            shared.setdefault(kind, []).append(cause)
        names += [(kind, ", ".join(causes)) for kind, causes in shared.items()]
        return "".join(f'<span><i class="{kind}"></i>{text(name)}</span>' for kind, name in names)


def _clock(seconds: float, step: float) -> str:
    """Return a place of the axis as text."""
    if step >= 86400:
        return f"{seconds / 86400:g} d"
    if step < 60:
        return f"{seconds:g} s" if seconds < 60 else f"{int(seconds // 60)}:{int(seconds % 60):02d}"
    hours, minutes = divmod(round(seconds / 60), 60)
    return f"{hours} h {minutes:02d}" if hours and minutes else f"{hours} h" if hours else f"{minutes} min"


def _bar(left: float, right: float, y: int, kind: str, title: str) -> str:
    width = max(round(right - left, 2), NARROW)
    rectangle = f'<rect class="{kind}" x="{left}" y="{y}" width="{width}" height="{BAR}">'
    return f"{rectangle}<title>{text(title)}</title></rect>"


def _joined(spans: Sequence[Span], narrow: float) -> list[tuple[float, float, str | Failure]]:
    """Return the spans with neighbours of one use joined,
    and those that are too narrow to be visible with the one before.
    """
    points: list[tuple[float, float, str | Failure]] = []
    for span in spans:
        if points and (points[-1][2] is span.use or points[-1][2] == span.use or span.end - span.begin < narrow):
            points[-1] = (points[-1][0], span.end, points[-1][2])
        else:
            points.append((span.begin, span.end, span.use))
    return points


def _thinned(points: Sequence[tuple[float, float]], narrow: float) -> list[tuple[float, float]]:
    """Return the points that are far enough from each other, and the last one."""
    kept = [points[0]]
    for point in points[1:-1]:
        if point[0] - kept[-1][0] >= narrow:
            kept.append(point)
    return [*kept, points[-1]]


def page(
    account: Account, name: str, state: str, figures: Sequence[tuple[str, str, str]], tables: Sequence[Any]
) -> str:
    """Return the page. name: of the run. tables: with title, columns, rows and note."""
    timeline = Timeline(account)
    boxes = "".join(
        f"<div><dt>{text(what)}</dt><dd><b>{text(value)}</b><span>{text(meaning)}</span></dd></div>"
        for what, value, meaning in figures
    )
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{text(name)}: zaya aegis</title><style>{STYLE}</style></head><body>",
        f"<h1>{text(name)}</h1><p>{text(state)}</p><p><code>{text(' '.join(account.command))}</code></p>",
        f"<dl>{boxes}</dl><h2>Timeline</h2>",
        f'<div class="wide">{timeline.svg()}</div><div class="legend">{timeline.legend()}</div>',
    ]
    for table in tables:
        head = "".join(f"<th>{text(column)}</th>" for column in table.columns)
        rows = "".join(f"<tr>{''.join(f'<td>{text(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
        note = f"<p>{text(table.note)}</p>" if table.note else ""
        parts.append(f"<h2>{text(table.title)}</h2>{note}")
        parts.append(f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>')
    return "\n".join([*parts, "</body></html>", ""])
