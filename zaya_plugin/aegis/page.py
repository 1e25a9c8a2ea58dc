# SPDX-License-Identifier: Apache-2.0
"""The report as the content of a page (zaya_plugin/pictures): figures, the timeline of the run, tables."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from zaya_plugin.aegis.account import END, START, TRAINING, Account, Failure, Span
from zaya_plugin.aegis.report import figures, state, tables
from zaya_plugin.pictures.content import ALARM, COLOURS, GOOD, NEUTRAL, Bars, Line, Page, Panel, Points

COLUMNS = 2000  # of the drawing: narrower spans and nearer points are joined with their neighbours
USES = {TRAINING: GOOD, START: NEUTRAL, END: "#a9b4c2"}
CAUSES = (ALARM, *(colour for colour in COLOURS if colour not in (ALARM, GOOD, NEUTRAL)))
UNITS = (
    (300.0, 1.0, "seconds"),
    (10800.0, 60.0, "minutes"),
    (345600.0, 3600.0, "hours"),
    (float("inf"), 86400.0, "days"),
)
ROWS = ("time", "attempts", "failures", "checkpoints")


def page(account: Account, name: str) -> Page:
    """Return the page. name: of the run."""
    return Page(
        title=name,
        lead=[state(account), shlex.join(account.command)],
        figures=figures(account),
        panels=timeline(account),
        tables=tables(account),
    )


def timeline(account: Account) -> list[Panel]:
    """Return the panels of the time: what it was used for, attempts, failures, checkpoints, and steps."""
    divisor, unit = next((divisor, unit) for most, divisor, unit in UNITS if account.seconds <= most)
    label, narrow = f"{unit} since the start", account.seconds / COLUMNS
    causes = [row["cause"] for row in account.by_cause()]
    colours = {cause: CAUSES[min(number, len(CAUSES) - 1)] for number, cause in enumerate(causes)}

    def bars(row: str, spans: Sequence[tuple[float, float, str, str]]) -> Bars:
        begin, end, texts, shades = [*zip(*spans, strict=True)] or [()] * 4
        return Bars(row, [at / divisor for at in begin], [at / divisor for at in end], texts, shades)

    uses = [
        (
            begin,
            end,
            f"{_name(use)}: {end - begin:,.1f} s",
            colours[use.cause] if isinstance(use, Failure) else USES[use],
        )
        for begin, end, use in _joined(account.spans, narrow)
    ]
    attempts = [
        (
            one.start,
            one.end,
            f"attempt {one.generation}: {one.world_size} ranks on {' '.join(one.nodes[:8])}",
            "#a9b4c2",
        )
        for one in account.attempts
    ]
    failures = Points(
        "failures",
        [one.time / divisor for one in account.failures],
        [
            f"{number}: {_name(one)}, {one.action or 'no decision'}. {one.reason}"
            for number, one in enumerate(account.failures, 1)
        ],
        [colours[one.cause] for one in account.failures],
    )
    saved = _apart(account.checkpoints, narrow)
    checkpoints = Points(
        "checkpoints",
        [time / divisor for time, _ in saved],
        [f"checkpoint of step {step:,}" for _, step in saved],
        [NEUTRAL] * len(saved),
        "dash",
    )
    shared: dict[str, list[str]] = {}
    for cause, colour in colours.items():
        shared.setdefault(colour, []).append(cause)
    key = [*((use, colour, "solid") for use, colour in USES.items())]
    key += [(", ".join(names), colour, "solid") for colour, names in shared.items()]
    marks = [(time / divisor, NEUTRAL) for time in account.pauses]
    note = "Dashed: the run had ended, and a person started it again." if marks else ""
    layers = [bars("time", uses), bars("attempts", attempts), failures, checkpoints]
    used = Panel("Timeline", label, layers, note=note, rows=ROWS, marks=marks, key=key, wide=True)
    steps = Panel("Steps", label, _steps(account, divisor, narrow), "step", marks=marks, wide=True)
    steps.key = [("kept", GOOD, "solid"), ("lost: repeated by a later attempt", ALARM, "dashed")]
    return [used, steps] if steps.layers else [used]


def _name(use: str | Failure) -> str:
    return f"{use.cause} on {use.node or 'no node'}" if isinstance(use, Failure) else use


def _steps(account: Account, divisor: float, narrow: float) -> list[Line]:
    """Return the steps over time that were kept, and those that were made again, with a gap between attempts."""
    kept_points, lost_points = [], []
    for one in account.attempts:
        if not one.points:
            continue
        kept = max(min(one.kept, one.last_step), one.base)
        edge = (one.time_at(kept), kept)
        kept_points.append([*(point for point in one.points if point[1] < kept), edge])
        lost_points.append([edge, *(point for point in one.points if point[1] > kept)])
    lines = []
    for name, colour, dash, parts in (("kept", GOOD, "solid", kept_points), ("lost", ALARM, "dashed", lost_points)):
        parts = [[*_apart(part[:-1], narrow), part[-1]] for part in parts if len(part) > 1]
        if points := [point for part in parts for point in ((part[0][0], float("nan")), *part)]:
            x, y = zip(*points, strict=True)
            lines.append(Line(name, [at / divisor for at in x], y, y, y, colour, dash))
    return lines


def _joined(spans: Sequence[Span], narrow: float) -> list[tuple[float, float, str | Failure]]:
    """Return the spans with neighbours of one use joined, and those that are too narrow to be visible with the one
    before.
    """
    points: list[tuple[float, float, str | Failure]] = []
    for span in spans:
        if points and (points[-1][2] is span.use or points[-1][2] == span.use or span.end - span.begin < narrow):
            points[-1] = (points[-1][0], span.end, points[-1][2])
        else:
            points.append((span.begin, span.end, span.use))
    return points


def _apart(points: Sequence[tuple[float, float]], narrow: float) -> list[tuple[float, float]]:
    """Return the points whose time is at least `narrow` after that of the one before."""
    kept: list[tuple[float, float]] = []
    for point in points:
        if not kept or point[0] - kept[-1][0] >= narrow:
            kept.append(point)
    return kept
