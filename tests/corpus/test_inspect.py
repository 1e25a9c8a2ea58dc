# SPDX-License-Identifier: Apache-2.0
"""`zaya data inspect`: documents, bins and training samples as text."""

import json

import numpy as np
import pytest

from zaya_plugin import cli
from zaya_plugin.corpus.inspect import document_lengths
from zaya_plugin.data.prepared import runs


@pytest.fixture
def shown(capsys):
    def call(*argv):
        capsys.readouterr()
        status = cli.main(["data", "inspect", *map(str, argv)])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_documents_with_their_text(prepared, texts, shown, read_tokens):
    from zaya_plugin.corpus.part_files import split_of

    held_out = [text for text in texts if split_of(text, 0.2) == "valid"]
    status, out, _ = shown(prepared, "--split", "valid", "--start", 5, "--count", 2, "--json")
    found = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [each["text"] for each in found] == [f"{text}<|endoftext|>" for text in held_out[5:7]]
    lengths = [len(document) for document in read_tokens(prepared / "valid")[5:7]]
    assert [each["tokens"] for each in found] == lengths and [each["documents"] for each in found] == [
        [n] for n in lengths
    ]
    assert found[0]["loss_positions"] == [[0, lengths[0] - 1]] and found[0]["source"] == str(prepared / "valid")
    status, out, _ = shown(prepared, "--count", 1, "--characters", 20)
    assert "document 0 of" in out and "characters ...]" in out


def test_bins_of_a_packed_set(prepared, tmp_path, shown):
    assert (
        cli.main(
            ["data", "pack", str(prepared), "--sequence-length", "200", "--output", str(tmp_path / "bins"), "--quiet"]
        )
        == 0
    )
    status, out, _ = shown(tmp_path / "bins", "--start", 3, "--count", 1, "--json")
    found = json.loads(out)
    tokens = np.fromfile(tmp_path / "bins" / "train.bin", np.uint16)[600:800]
    assert status == 0 and found["tokens"] == 200 and sum(found["documents"]) + found["filling"] == 200
    assert found["text"].endswith("<|endoftext|>") and found["text"].count("<|endoftext|>") == len(found["documents"])
    assert found["in_loss"] == int((tokens[:-1] != 0).sum())


def test_errors_say_what_to_do(prepared, tmp_path, shown):
    assert shown(prepared, "--start", 100_000)[0] == 2
    status, _, err = shown(prepared, prepared)
    assert status == 2 and "several datasets are a blend" in err
    status, _, err = shown(tmp_path / "none")
    assert status == 2 and "there is no dataset at this path" in err


def test_runs_and_document_lengths():
    assert runs(np.array([1, 1, 0, 0, 1], bool)) == [(0, 2), (4, 5)] and runs(np.zeros(3, bool)) == []
    for tokens, lengths in (([4, 5, 0, 6, 0, 0, 0], [3, 2]), ([4, 5, 0, 6], [3, 1]), ([0, 0, 0], [1])):
        assert document_lengths(np.array(tokens), 0, np.array(tokens) == 0) == lengths
    assert document_lengths(np.array([4, 0, 4]), None, None) == [3]
