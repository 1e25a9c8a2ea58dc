# SPDX-License-Identifier: Apache-2.0
"""Messages and rows of the journal: one table each, and only values of their types."""

import json
from dataclasses import fields

import pytest

from zaya_plugin.aegis.attempt_phases import Phase
from zaya_plugin.aegis.diagnose.evidence import Evidence
from zaya_plugin.aegis.protocol import (
    MESSAGES,
    ROWS,
    AttemptStart,
    Diagnosis,
    Join,
    ListOrTuple,
    Number,
    Progress,
    RankExit,
    Row,
    message_of,
    row_of,
    to_json,
)

EVIDENCE = Evidence(5.0, "n1", "exit", "killed", 3, None, {"exit_code": -9})
VALUES = {int: 3, Number: 2.5, str: "n1", list: [1], ListOrTuple: [1], dict: {"1": 2}}
VALUES |= {Evidence: EVIDENCE, list[Evidence]: [EVIDENCE]}


@pytest.mark.parametrize("kind", [*MESSAGES.values(), *ROWS.values()], ids=lambda kind: kind.__name__)
def test_a_message_and_a_row_are_the_same_after_json(kind):
    item = kind(**{column.name: VALUES[column.type] for column in fields(kind) if column.type in VALUES})
    body = json.loads(json.dumps(to_json(item)))
    assert (message_of(body) if kind in MESSAGES.values() else row_of(body)) == item


def test_every_message_of_an_agent_and_every_phase_has_a_method(decider):
    to_agent = {"BeatAnswer", "BeatRequest", "FindPort", "Start", "Dump", "Save", "Stop", "Leave"}
    assert {*decider.handlers} == {kind for name, kind in MESSAGES.items() if name not in to_agent} - {Join}
    assert {*decider.phases} == {*Phase}


@pytest.mark.parametrize("wrong", [None, "3", [3], True, float("nan"), 10**400])
def test_a_message_with_a_value_of_another_type_is_refused(wrong):
    body = to_json(RankExit(1, 0, -9, 5.0))
    with pytest.raises(TypeError, match="rank is "):
        message_of(body | {"rank": wrong})
    with pytest.raises(KeyError):
        message_of({name: value for name, value in body.items() if name != "rank"})
    with pytest.raises(KeyError):
        message_of(body | {"kind": "rank_exit"})


def test_a_value_of_another_type_is_missing_from_a_row():
    line = {"kind": "progress", "time": 7.0, "generation": 1, "step": 3, "step_seconds": "fast", "colour": "red"}
    assert row_of(line) == Progress(3, time=7.0, generation=1)
    assert row_of(line | {"step": None}) == Row(time=7.0, generation=1) == row_of(line | {"kind": "surprise"})
    assert row_of({"kind": "attempt", "nodes": ["n1"], "world_size": 1e30}) == AttemptStart(["n1"])
    diagnosis = {"kind": "diagnosis", "cause": "x", "evidence": [EVIDENCE.to_json(), {"text": "cut"}, 3]}
    assert row_of(diagnosis) == Diagnosis("x", evidence=[EVIDENCE])
    later = EVIDENCE.to_json() | {"colour": "red"}
    assert row_of({"kind": "diagnosis", "cause": "x", "evidence": [later]}) == Diagnosis("x", evidence=[EVIDENCE])
    damaged = {"kind": "attempt", "nodes": "n1", "generation": 2, "time": 7.0}
    assert row_of(damaged) == AttemptStart([], time=7.0, generation=2)
