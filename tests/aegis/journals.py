# SPDX-License-Identifier: Apache-2.0
"""Rows of journals for the tests of the account, the report and the status."""

import json
from pathlib import Path

from zaya_plugin.aegis.journal import KINDS

BEGIN = 1_000_000.0
GPUS = 16


def row(time, kind, generation=1, **values):
    assert set(values) <= set(KINDS[kind])
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


def write(folder: Path, rows) -> Path:
    """Write a journal below the run directory `folder`, which is returned."""
    (folder / "aegis").mkdir(parents=True)
    (folder / "aegis" / "journal.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return folder
