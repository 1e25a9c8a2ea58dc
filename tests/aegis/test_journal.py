# SPDX-License-Identifier: Apache-2.0
"""The journal survives kills of its writer, and evidence its way over the network."""

import json
import resource

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


def test_no_secret_of_a_log_line_reaches_the_journal(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    line = "in /home/ann/x.py: WANDB_API_KEY=abcdef0123 was refused by https://ann:hunter22@host/x"
    said = Evidence(1.0, "n1", "rank", line, values={"line": line}).to_json()
    journal.write("symptom", 1, evidence=said)
    journal.write("diagnosis", 1, cause="x", node="n1", evidence=[said], fingerprint="x: key=1")
    journal.write("end", 1, code=1, reason=line)
    text = (tmp_path / "journal.jsonl").read_text()
    assert "abcdef0123" not in text and "hunter22" not in text
    assert text.count("<removed>") == 10 and text.count("/home/ann/x.py") == 5 and "x: key=1" in text


def test_evidence_is_the_same_after_json():
    seen = Evidence(12.5, "n1", "exit", "killed by SIGKILL", rank=3, values={"exit_code": -9})
    row = json.loads(json.dumps(seen.to_json()))
    assert Evidence.from_json(row) == seen and "rule" not in row
    with pytest.raises(TypeError):
        Evidence.from_json(row | {"colour": 1})


def test_a_text_of_any_bytes_can_be_shown():
    assert printable(b"\x1b[31mred\x00\xff\n") == "[31mred �"
    assert len(printable("x" * 10_000_000)) == TEXT


def test_the_words_of_a_command_and_named_values_hold_no_secret_either(tmp_path):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    journal.write("begin", 0, command=["train", "--password", "hunter22", "--lr", "0.1"])
    said = Evidence(1.0, "n1", "rank", "refused", values={"api_token": "abcdef0123", "seconds": 3}).to_json()
    journal.write("symptom", 1, evidence=said)
    begin, symptom = read(path)
    assert begin["command"] == ["train", "--password", "<removed>", "--lr", "0.1"]
    assert symptom["evidence"]["values"] == {"api_token": "<removed>", "seconds": 3}


def test_a_full_disk_keeps_the_lines_and_ends_nothing(tmp_path, capsys):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # the kernel writes a part of the line, then refuses
    try:
        for step in range(3):
            assert journal.write("first_step", 1, step=step)["step"] == step
        assert path.stat().st_size == 100 and len(list(read(path))) < 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    journal.write("end", 1, code=0, reason="done")
    assert [row.get("step") for row in read(path)] == [0, 1, 2, None]
    assert capsys.readouterr().err.count("the journal cannot be written (File too large)") == 1
    journal.close()
