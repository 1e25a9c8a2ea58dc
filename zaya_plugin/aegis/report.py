# SPDX-License-Identifier: Apache-2.0
"""The account of a supervised run as tables, for the terminal and for one HTML page, and as JSON."""

from __future__ import annotations

import shlex
import textwrap
import time
from dataclasses import asdict
from typing import Any

from zaya_plugin.aegis.account import Account, Stage
from zaya_plugin.aegis.diagnose.evidence import printable
from zaya_plugin.ground.columns import aligned
from zaya_plugin.ground.durations import duration
from zaya_plugin.pictures.content import Table

SHOWN = 500  # rows of a table
WIDEST_COLUMN = 60  # characters, in the terminal


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f} %"


def moment(clock: float | None) -> str:
    """Return a time since 1970 for a person."""
    try:
        return "-" if clock is None else time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(clock))
    except (OverflowError, ValueError, OSError):
        return "-"


def state(account: Account) -> str:
    """Return the state of the run for a person."""
    if account.begin is None:
        return "the journal is empty"
    if not account.ended:
        return "no end in the journal; figures up to its last line"
    code = "no exit code" if account.code is None else f"exit code {account.code}"
    return f"ended, {code}: {account.reason}"


def figures(account: Account) -> list[tuple[str, str, str]]:
    """Return name, value and meaning of the figures of a run."""
    detect, recover = account.mean("detect"), account.mean("recover")
    lost = sum(one.gpu_hours for one in account.failures)
    kinds = ", ".join(f"{number} {action}" for action, number in sorted(account.decisions.items())) or "none"
    return [
        ("supervised", duration(account.seconds), f"since {moment(account.begin)}, pauses between runs left out"),
        ("effective training time", percent(account.ettr), "training that was kept / time (ETTR)"),
        ("goodput", percent(account.goodput), "kept steps x median step time / time"),
        ("uptime", percent(account.uptime), "time in which ranks were running / time"),
        ("steps kept", f"{account.kept_steps:,.0f}", f"{account.step_seconds or 0:.3g} s a step (median)"),
        ("steps lost", f"{account.lost_steps:,.0f}", "made, and made again after a failure"),
        ("GPU hours", f"{account.gpu_hours:,.2f}", f"{lost:,.2f} of them lost to failures"),
        ("attempts", f"{len(account.attempts):,}", f"{len(account.failures)} ended by a failure"),
        ("decisions", f"{sum(account.decisions.values()):,}", kinds),
        ("mean time to detect", duration(detect), "from the evidence on its node to the symptom"),
        ("mean time to recover", duration(recover), "from the symptom to the next attempt's first step"),
    ]


def place(account: Account, step: float | None) -> str:
    """Return a step of the run for a person: that of its stage, where there are several."""
    if step is None:
        return "-"
    if len(account.stages) < 2:
        return f"{step:,.0f}"
    stage = account.stage_at(step)
    return f"{step - stage.before:,.0f} of {name_of(account, stage)}"


def name_of(account: Account, stage: Stage) -> str:
    return stage.name or f"stage {account.stages.index(stage) + 1}"


def tables(account: Account) -> list[Table]:
    """Return the tables of a run."""
    causes = [
        (
            row["cause"],
            str(row["failures"]),
            f"{row['lost_steps']:,.0f}",
            duration(row["seconds"]),
            f"{row['gpu_hours']:,.2f}",
        )
        for row in account.by_cause()
    ]
    failures = [
        (
            str(number),
            moment(one.clock),
            str(one.generation),
            one.cause,
            one.node or "-",
            "-" if one.rank is None else str(one.rank),
            one.action or "-",
            duration(one.detect),
            duration(one.recover),
            f"{one.lost_steps:,.0f}",
            f"{one.gpu_hours:,.2f}",
        )
        for number, one in enumerate(account.failures, 1)
    ]
    attempts = [
        (
            str(one.generation),
            moment(one.clock),
            duration(one.end - one.start),
            str(one.world_size),
            place(account, one.base if len(account.stages) > 1 else one.resume_step),
            place(account, one.last_step),
            "-" if one.failure is None else one.failure.cause,
            " ".join(one.nodes[:4]) + (f" and {len(one.nodes) - 4} more" if len(one.nodes) > 4 else ""),
        )
        for one in account.attempts
    ]
    why = [
        (str(number), one.action or "-", one.reason or "-", one.text or "-")
        for number, one in enumerate(account.failures, 1)
    ]
    stages = [
        (
            name_of(account, stage),
            f"{account.kept_in(stage):,.0f}",
            "-" if stage.step_seconds is None else f"{stage.step_seconds:.3g} s",
        )
        for stage in account.stages
    ]
    parts = [
        Table("Stages", ("stage", "steps kept", "a step (median)"), stages if len(stages) > 1 else []),
        Table("Lost by cause", ("cause", "failures", "steps", "time", "GPU hours"), causes),
        Table(
            "Failures",
            tuple("# time attempt cause node rank action detect recover".split()) + ("lost steps", "GPU hours"),
            failures,
        ),
        Table("Why", ("#", "action", "reason", "first evidence"), why),
        Table(
            "Waited for",
            ("after", "cause", "node", "reason"),
            [(duration(one["time"]), one["cause"], one["node"] or "-", one["reason"]) for one in account.rides],
        ),
        Table(
            "Attempts", ("attempt", "start", "time", "ranks", "from step", "last step", "ended by", "nodes"), attempts
        ),
        Table("Nodes left out", ("node", "reason"), sorted(account.nodes_out.items())),
    ]
    return [_shortened(table) for table in parts if table.rows]


def _shortened(table: Table) -> Table:
    rows = [tuple(printable(cell) for cell in row) for row in table.rows]
    note = f"the last {SHOWN} of {len(rows):,}" if len(rows) > SHOWN else ""
    return Table(table.title, table.columns, rows[-SHOWN:], note)


def as_text(account: Account) -> str:
    """Return the report for a terminal."""
    parts = [f"command  {printable(shlex.join(account.command))}", f"state    {printable(state(account))}", ""]
    rows = figures(account)
    parts += [printable(f"{name:24}{value:>14}   {meaning}") for name, value, meaning in rows]
    for table in tables(account):
        columns = aligned([table.columns, *table.rows], widest=WIDEST_COLUMN)
        parts += ["", table.title + (f" ({table.note})" if table.note else ""), textwrap.indent(columns, "  ")]
    return "\n".join(parts)


def as_json(account: Account) -> dict[str, Any]:
    """Return the figures, failures and attempts as plain data."""
    names = "command ended code reason begin seconds ettr goodput uptime training step_seconds kept_steps lost_steps"
    one_by_one = {"attempts": account.attempts, "failures": account.failures, "stages": account.stages}
    return {
        **{name: getattr(account, name) for name in f"{names} gpu_hours decisions nodes_out".split()},
        "mean_detect": account.mean("detect"),
        "mean_recover": account.mean("recover"),
        "by_cause": account.by_cause(),
        **{name: [asdict(row) for row in rows] for name, rows in one_by_one.items()},
    }
