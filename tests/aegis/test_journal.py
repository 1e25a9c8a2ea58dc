# SPDX-License-Identifier: Apache-2.0
"""The journal survives kills of its writer, and evidence its way over the network."""

import json

import pytest

from zaya_plugin.aegis.evidence import TEXT, Evidence, printable
from zaya_plugin.aegis.journal import Journal, read


def test_a_line_that_was_cut_off_is_left_out_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / "aegis" / "journal.jsonl"
    journal = Journal(path)
    journal.write("first_step", 1, step=3)
    journal.close()
    with open(path, "a") as file:
        file.write('{"time": 1, "kind": "first_st')
    journal = Journal(path)
    journal.write("end", 1, code=0, reason="done")
    assert [(row["kind"], row["generation"]) for row in read(path)] == [("first_step", 1), ("end", 1)]
    with pytest.raises(ValueError, match="no end with"):
        journal.write("end", 1, cause="x")
    with pytest.raises(ValueError, match="no surprise"):
        journal.write("surprise", 1)


def test_evidence_is_the_same_after_json():
    seen = Evidence(12.5, "n1", "exit", "killed by SIGKILL", rank=3, values={"exit_code": -9})
    row = json.loads(json.dumps(seen.to_json()))
    assert Evidence.from_json(row) == seen and "rule" not in row
    with pytest.raises(TypeError):
        Evidence.from_json(row | {"colour": 1})


def test_a_text_of_any_bytes_can_be_shown():
    assert printable(b"\x1b[31mred\x00\xff\n") == "[31mred �"
    assert len(printable("x" * 10_000_000)) == TEXT
