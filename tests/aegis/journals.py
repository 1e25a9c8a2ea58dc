# SPDX-License-Identifier: Apache-2.0
"""Rows of journals for the tests of the account, the report and the status."""

import json
from dataclasses import fields
from pathlib import Path

from zaya_plugin.aegis.account import Account
from zaya_plugin.aegis.bookkeeping import account
from zaya_plugin.aegis.journal import read
from zaya_plugin.aegis.protocol import ROWS, row_of, to_json

BEGIN = 1_000_000.0
GPUS = 16


def row(time, kind, generation=1, **values):
    assert set(values) <= {column.name for column in fields(ROWS[kind])}
    return {"time": BEGIN + time, "kind": kind, "generation": generation, **values}


def begin(time, **values):
    return row(time, "begin", 0, command=["zaya", "train"], nodes=2, spares=1, ranks_per_node=8, **values)


def attempt(time, generation, resume_step=None, world_size=GPUS):
    return row(time, "attempt", generation, nodes=["n1", "n2"], world_size=world_size, resume_step=resume_step)


def failure(time, happened, cause, action, last_step, last_time, generation=1, **decision):
    """The lines of a failure that is seen at `time`, and whose evidence is of `happened`."""
    evidence = {"time": BEGIN + happened, "node": "n2", "source": "exit", "text": f"seen: {cause}"}
    values = {"nodes_out": [], "delay": 0, "to_step": None, "skip": None, "reason": f"{cause}: {action}"}
    said = dict(cause=cause, node="n2", rank=9, role="root", severity="high", confidence="sure", first=BEGIN + happened)
    return [
        row(time, "symptom", generation, evidence=evidence),
        row(time + 1, "progress", generation, step=last_step, step_seconds=2.0, at=BEGIN + last_time),
        row(time + 1, "diagnosis", generation, evidence=[evidence], cascades={}, **said),
        row(time + 1, "decision", generation, action=action, **values | decision),
        row(time + 3, "stopped", generation, seconds=2.0, survivors=[]),
    ]


def first_step(time, step, generation=1):
    return row(time, "first_step", generation, step=step)


# 16 GPUs; steps of 2 s. 0 to 20 s: start. Step 1 is seen at 22 s, step 40 at 100 s; a rank dies at 101 s, seen at 101.5 s.
# Checkpoint of step 30 (done at 80 s). Attempt 2 starts at 110 s and makes step 31 until 132 s, step 100 until 270 s.
ONE_CRASH = [
    begin(0),
    row(0.5, "decider", 0, pid=1, reason="start"),
    attempt(10, 1),
    first_step(22, 1),
    row(81, "checkpoint", step=30),
    *failure(101.5, 101.0, "sigkill", "restart", 40, 100.0),
    attempt(110, 2, resume_step=30),
    first_step(132, 31, 2),
    row(270, "progress", 2, step=100, step_seconds=2.0),
    row(280, "end", 2, code=0, reason="done"),
]

# Steps of 2 s, then a second stage of 4 s a step that starts for 30 s. A rank dies at 200 s, after the second stage's
# step 15; its checkpoint of step 10 is loaded, and step 11 is made until 234 s.
TWO_STAGES = [
    begin(0),
    attempt(2, 1),
    row(12, "first_step", step=1, stage="one", after=0),
    row(112, "progress", step=50, step_seconds=2.0, at=BEGIN + 110, stage="one"),
    row(144, "progress", step=1, step_seconds=4.0, stage="two", after=0),
    row(201, "symptom", evidence={"time": BEGIN + 200.5, "node": "n2", "source": "exit", "text": "killed"}),
    row(202, "progress", step=15, step_seconds=4.0, at=BEGIN + 200, stage="two"),
    *failure(201.0, 200.5, "sigkill", "restart", 15, 200.0)[2:],
    attempt(210, 2),
    row(234, "first_step", 2, step=11, stage="two", after=10),
    row(311, "progress", 2, step=30, step_seconds=4.0, at=BEGIN + 310, stage="two"),
    *failure(315, 314, "ras_ue", "exchange", 30, 310.0, generation=2)[2:],
    row(320, "end", 2, code=1, reason="no node is left"),
]


def account_of(lines) -> Account:
    return account(map(row_of, lines))


def lines(path: Path, kind: str | None = None) -> list[dict]:
    """The lines of a journal, of one kind or all."""
    return [line for line in map(to_json, read(path)) if kind in (None, line["kind"])]


def write(folder: Path, rows) -> Path:
    """Write a journal below the run directory `folder`, which is returned."""
    (folder / "aegis").mkdir(parents=True)
    (folder / "aegis" / "journal.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return folder
