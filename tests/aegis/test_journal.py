# SPDX-License-Identifier: Apache-2.0
"""The journal survives kills of its writer, and evidence its way over the network."""

import json
import resource

import pytest

from zaya_plugin.aegis.diagnose.evidence import TEXT, Evidence, printable
from zaya_plugin.aegis.journal import Journal, read
from zaya_plugin.aegis.protocol import Begin, Diagnosis, End, FirstStep, Symptom


def test_a_line_that_was_cut_off_is_left_out_and_the_next_one_is_whole(tmp_path):
    path = tmp_path / "aegis" / "journal.jsonl"
    journal = Journal(path)
    journal.write(FirstStep(3), 1)
    journal.close()
    with open(path, "a") as file:
        file.write('{"time": 1, "kind": "first_st')
    journal = Journal(path)
    journal.write(End(0, "done"), 1)
    assert [(type(row), row.generation) for row in read(path)] == [(FirstStep, 1), (End, 1)]


def test_no_secret_of_a_log_line_reaches_the_journal(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    line = "in /home/ann/x.py: WANDB_API_KEY=abcdef0123 was refused by https://ann:hunter22@host/x"
    evidence = Evidence(1.0, "n1", "rank", line, values={"line": line})
    journal.write(Symptom(evidence), 1)
    journal.write(Diagnosis("x", "n1", evidence=[evidence], fingerprint="x: key=1"), 1)
    journal.write(End(1, line), 1)
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
    journal.write(Begin(["train", "--password", "hunter22", "--lr", "0.1"]), 0)
    journal.write(Symptom(Evidence(1.0, "n1", "rank", "refused", values={"api_token": "abcdef0123", "seconds": 3})), 1)
    begin, symptom = read(path)
    assert begin.command == ["train", "--password", "<removed>", "--lr", "0.1"]
    assert symptom.evidence.values == {"api_token": "<removed>", "seconds": 3}


def test_a_full_disk_keeps_the_lines_and_ends_nothing(tmp_path, capsys):
    path = tmp_path / "journal.jsonl"
    journal = Journal(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # the kernel writes a part of the line, then refuses
    try:
        for step in range(3):
            journal.write(FirstStep(step), 1)
        assert path.stat().st_size == 100 and len(list(read(path))) < 3
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    journal.write(End(0, "done"), 1)
    assert [getattr(row, "step", None) for row in read(path)] == [0, 1, 2, None]
    assert capsys.readouterr().err.count("the journal cannot be written (File too large)") == 1
    journal.close()
