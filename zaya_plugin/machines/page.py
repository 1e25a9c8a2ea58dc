# SPDX-License-Identifier: Apache-2.0
"""The record of `zaya verify` as the content of a page (zaya_plugin/pictures): one machine's checks, or the figures of
several nodes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from zaya_plugin.machines.checks import STATES
from zaya_plugin.pictures.content import ALARM, COLOURS, GOOD, NEUTRAL, Bars, Page, Panel, Points, Table

STATE_COLOURS = dict(zip(STATES, (GOOD, COLOURS[4], ALARM, NEUTRAL, "#a9b4c2"), strict=True))
MOST_ROWS = 64  # nodes of a panel; the failing ones first


def content(record: Mapping[str, Any]) -> Page:
    """Return the page of a record as verify.json has it."""
    facts = [str(record[name]) for name in ("command", "platform", "commit", "date") if record.get(name)]
    facts = [facts[0], ", ".join(facts[1:])] if len(facts) > 1 else facts
    return _nodes(record["nodes"], facts) if "nodes" in record else _machine(record, facts)


def _machine(record: Mapping[str, Any], facts: Sequence[str]) -> Page:
    checks, machine = record["checks"], record["machine"]
    states = [entry["state"] for entry in checks]
    names = [entry["check"] for entry in checks]
    bars = [
        Bars(
            entry["check"],
            [0.0],
            [entry["seconds"]],
            [f"{entry['check']}: {entry['state']}, {entry['seconds']:.1f} s"],
            [STATE_COLOURS[entry["state"]]],
        )
        for entry in checks
    ]
    key = [(state, colour, "solid") for state, colour in STATE_COLOURS.items() if state in states]
    rows = [(entry["check"], entry["state"], f"{entry['seconds']:.1f} s", entry["reason"]) for entry in checks]
    details = [(entry["check"], line) for entry in checks for line in entry["details"]]
    devices = f"{machine['devices']} x " if machine.get("devices") else ""
    return Page(
        title=f"zaya verify: {devices}{machine.get('name', 'an unknown device')}",
        lead=facts,
        figures=[(state, str(states.count(state)), "checks") for state in STATES],
        panels=[Panel("Time of the checks", "seconds", [*bars], rows=names, key=key, zooms=False, wide=True)]
        if names
        else [],
        tables=[
            Table("Checks", ("check", "state", "time", "reason"), rows),
            *([Table("Details", ("check", ""), details)] if details else []),
        ],
    )


def _nodes(nodes: Sequence[Mapping[str, Any]], facts: Sequence[str]) -> Page:
    order = sorted(nodes, key=lambda node: (not node["failures"], node["node"]))
    shown = order[:MOST_ROWS]
    figures = sorted({name for node in nodes for name in node["figures"]})
    note = f"{len(shown)} of {len(nodes)} nodes, the failing ones first." if len(shown) < len(nodes) else ""
    panels = []
    for figure in figures:
        points = []
        for node in shown:
            values = node["figures"].get(figure, {})
            texts = [f"{node['node']} {device}: {value:.4g}" for device, value in values.items()]
            colour = ALARM if node["failures"] else GOOD
            points.append(Points(node["node"], [*values.values()], texts, [colour] * len(values)))
        panels.append(Panel(figure, figure, points, note=note, rows=[node["node"] for node in shown], zooms=False))
    rows = []
    for node in order:
        worst = [f"{min(values.values()):.4g}" if (values := node["figures"].get(name)) else "-" for name in figures]
        reasons = "; ".join(f"{reason} [AMD code {code}]" if code else reason for code, reason in node["failures"])
        rows.append((node["node"], "fail" if node["failures"] else "pass", *worst, reasons))
    failing = sum(bool(node["failures"]) for node in nodes)
    return Page(
        title=f"zaya verify: {len(nodes)} nodes",
        lead=facts,
        figures=[("pass", str(len(nodes) - failing), "nodes"), ("fail", str(failing), "nodes")],
        overview=[Table("Nodes", ("node", "verdict", *figures, "reasons"), rows, "The worst value of each figure.")],
        panels=panels,
    )
