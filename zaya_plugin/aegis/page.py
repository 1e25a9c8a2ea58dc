# SPDX-License-Identifier: Apache-2.0
"""The report as one HTML page: figures, a timeline of attempts, failures and checkpoints, and the table of failures.

Nothing is loaded from elsewhere and no script runs. All texts are escaped, since causes may name lines of logs.
"""

from __future__ import annotations

from html import escape

from zaya_plugin.aegis.account import Account, figures, length

WIDTH, LEFT, ROW, TOP, SHOWN_MARKS = 960, 90, 22, 26, 2000
STYLE = """
:root { color-scheme: light dark; --start: #c9a227; --train: #2e7d5b; --fault: #c0392b; --mark: #3c6ea8 }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 1000px; margin: 2rem auto; padding: 0 1rem }
table { border-collapse: collapse; width: 100%; margin: 1rem 0 }
td, th { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid #8884; vertical-align: top }
svg { width: 100%; height: auto; background: #8881; border-radius: 6px } text { font-size: 12px; fill: currentColor }
"""


def page(found: Account) -> str:
    """Return the page."""
    rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in figures(found))
    lost = "".join(
        f"<tr><td>{escape(cause)}</td><td>{hours:,.2f}</td></tr>" for cause, hours in found.lost_hours().items()
    )
    failures = "".join(
        "<tr>"
        + "".join(
            f"<td>{escape(str(value))}</td>"
            for value in (
                length(each.happened - found.begin),
                each.cause,
                each.node or "",
                "" if each.rank is None else each.rank,
                length(each.detected - each.happened),
                length(found.cost(each)),
                each.lost_steps,
                each.action,
                each.reason,
            )
        )
        + "</tr>"
        for each in found.failures
    )
    heads = "".join(
        f"<th>{name}</th>"
        for name in ("after", "cause", "node", "rank", "detected in", "cost", "steps again", "action", "reason")
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Aegis report</title><style>{STYLE}</style>'
        f"<h1>Supervised run</h1><table>{rows}</table><h2>Timeline</h2>{timeline(found)}"
        "<p>Yellow: from the launch to the first step. Green: steps. Red lines: failures. Blue marks: checkpoints.</p>"
        f"<h2>GPU hours without a new step</h2><table><tr><th>cause</th><th>hours</th></tr>{lost}</table>"
        f"<h2>Failures</h2><table><tr>{heads}</tr>{failures}</table></html>\n"
    )


def timeline(found: Account) -> str:
    """Return an SVG: a row for each attempt, failures across all rows, checkpoints at the bottom."""
    scale = (WIDTH - LEFT - 10) / (found.wall or 1.0)

    def x(at: float) -> float:
        return round(LEFT + scale * min(max(at - found.begin, 0.0), found.wall), 1)

    height, shapes = TOP + ROW * (len(found.attempts) + 1), []
    for number, each in enumerate(found.attempts):
        y, end = TOP + ROW * number, x(each["end"] or found.end)
        first = x(each["first"]) if each["first"] else end
        shapes.append(f'<text x="6" y="{y + 14}">attempt {int(each["generation"])}</text>')
        shapes.append(_bar(x(each["begin"]), first, y, "start"))
        shapes.append(_bar(first, end, y, "train"))
    for each in found.failures[:SHOWN_MARKS]:
        title = escape(f"{each.cause} {each.node or ''}: {each.action}")
        at = x(each.happened)
        shapes.append(
            f'<line x1="{at}" x2="{at}" y1="{TOP - 6}" y2="{height - ROW}" stroke="var(--fault)" stroke-width="2">'
            f"<title>{title}</title></line>"
        )
    every = -(-len(found.checkpoints) // SHOWN_MARKS) or 1
    y = height - ROW + 4
    shapes.append(f'<text x="6" y="{y + 10}">saved</text>')
    for at, step in found.checkpoints[::every]:
        shapes.append(
            f'<rect x="{x(at)}" y="{y}" width="2" height="12" fill="var(--mark)"><title>step {int(step)}</title></rect>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="timeline">{"".join(shapes)}</svg>'


def _bar(begin: float, end: float, y: int, colour: str) -> str:
    return f'<rect x="{begin}" y="{y}" width="{max(0.0, round(end - begin, 1))}" height="16" fill="var(--{colour})"/>'
