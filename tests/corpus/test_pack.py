# SPDX-License-Identifier: Apache-2.0
"""`zaya data pack`: whole documents in bins, trimmed, split or dropped; the same bytes after an interruption."""

import json
import os

import numpy as np
import pytest

from zaya_plugin import cli
from zaya_plugin.corpus import pack
from zaya_plugin.corpus.bin_writer import BinWriter
from zaya_plugin.data.prepared import check_dataset, load_manifest, packed_length, refuse_other_length

LENGTH = 128


@pytest.fixture
def packed(prepared, tmp_path):
    def call(*options, source=prepared, name="packed"):
        output = tmp_path / name
        arguments = [source, "--sequence-length", LENGTH, "--output", output, *options]
        return cli.main(["data", "pack", *map(str, arguments)]), output

    return call


def documents_of_bins(prefix, eod=0):
    """The documents in the bins of a set, without the filling."""
    found = []
    for tokens in np.fromfile(f"{prefix}.bin", np.uint16).reshape(-1, LENGTH):
        pieces = np.split(tokens, np.flatnonzero(tokens == eod) + 1)
        found += [piece.tolist() for piece in pieces if len(piece) > 1]
    return found


def test_every_document_is_whole_and_there_once(packed, prepared, read_tokens, capsys):
    status, output = packed()
    assert status == 0
    manifest = load_manifest(output)
    for split in ("train", "valid"):
        source = read_tokens(prepared / split)
        short = [tuple(document) for document in source if len(document) <= LENGTH]
        long = [document for document in source if len(document) > LENGTH]
        assert short and long
        found = [tuple(document) for document in documents_of_bins(output / split)]
        pieces = [tuple(document[at : at + LENGTH]) for document in long for at in range(0, len(document), LENGTH)]
        assert sorted(found) == sorted([*short, *(piece for piece in pieces if len(piece) > 1)])
        counts, tokens = manifest.packing.counts[split], sum(map(len, source))
        assert counts["bins"] * LENGTH - counts["filling tokens"] == tokens
        assert (counts["documents"], counts["split documents"], counts["pieces of split documents"]) == (
            len(source),
            len(long),
            len(pieces),
        )
        inside = sum(len(document) for document in short) - len(short)
        assert counts["loss tokens"] == inside + sum(len(piece) - 1 for piece in pieces)
    checked = check_dataset(output, 400, eod_id=0, full=True)
    assert checked["train"].documents == manifest.packing.counts["train"]["bins"]
    assert packed_length(output / "train") == LENGTH and packed_length(prepared) is None
    refuse_other_length(output, LENGTH)
    with pytest.raises(ValueError, match="stage.seq_length=64: .* bins of 128 tokens.* Fix: stage.seq_length=128"):
        refuse_other_length(output, 64)
    assert "% full" in capsys.readouterr().out


def test_dropped_documents_are_listed(packed, prepared, read_tokens):
    status, output = packed("--long", "drop")
    listed = [json.loads(line) for line in (output / "dropped.jsonl").read_text().splitlines()]
    expected = [
        {"split": split, "document": number, "tokens": len(document), "reason": "too long"}
        for split in ("train", "valid")
        for number, document in enumerate(read_tokens(prepared / split))
        if len(document) > LENGTH
    ]
    assert status == 0 and listed == expected


def test_chains_of_thought_keep_their_answers(tmp_path, run, packed, capsys):
    from tokenizers import Tokenizer

    def text(number, words):
        return (
            f"Question {number}?<think>{' '.join(f'step{step}' for step in range(words))}</think>The answer is "
            f"{number * 7}."
        )

    lines = [text(number, words) for number, words in enumerate([3, 200, 5, 300])]
    lines.append(lines[1].split("</think>")[0])  # it never came to an answer
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    source = tmp_path / "source"
    assert run("--input", tmp_path / "in.jsonl", "--output", source, "--train-bpe", 300, "--valid-fraction", 0) == 0
    status, output = packed("--trim-reasoning", "<think>", "</think>", source=source)
    tokenizer = Tokenizer.from_file(str(output / "tokenizer" / "tokenizer.json"))
    texts = sorted(tokenizer.decode(ids[:-1]) for ids in documents_of_bins(output / "text"))
    assert status == 0 and len(texts) == 4
    for number, (original, shortened) in enumerate(zip(sorted(lines[:4]), texts, strict=True)):
        assert shortened.startswith(f"Question {number}?<think>step0 ")
        assert shortened.endswith(f"</think>The answer is {number * 7}.")
        assert original.startswith(shortened.split("</think>")[0])
    counts = load_manifest(output).packing.counts["text"]
    assert (counts["tail cut"], counts["dropped documents"]) == (2, 1)
    assert json.loads((output / "dropped.jsonl").read_text())["reason"] == "no answer"
    assert "tail cut 2" in capsys.readouterr().out


def test_interrupted_run_leaves_nothing_in_the_way(packed, contents, monkeypatch, capsys):
    _, undisturbed = packed(name="whole")
    monkeypatch.setattr(pack, "CHUNK_TOKENS", 4 * LENGTH)
    calls, write = [], BinWriter.write

    def interrupt(self, *given):
        write(self, *given)
        calls.append(self.tokens // LENGTH)
        if len(calls) in (3, 5):
            raise KeyboardInterrupt

    monkeypatch.setattr(BinWriter, "write", interrupt)
    status, output = packed()
    assert (
        status == 130
        and not output.exists()
        and "the same command starts from the beginning" in capsys.readouterr().err
    )
    assert packed()[0] == 130 and calls == [4, 8, 12, 4, 8]
    monkeypatch.setattr(BinWriter, "write", write)
    assert packed()[0] == 0
    assert contents(output) == contents(undisturbed)
    assert sorted(os.listdir(output.parent)) == ["packed", "whole"]


def test_other_arguments_and_other_sources_are_refused(packed, tmp_path, capsys):
    assert packed()[0] == 0
    capsys.readouterr()
    assert packed()[0] == 0 and "% full" in capsys.readouterr().out
    assert packed("--long", "drop")[0] == 2
    assert "--long: it was made with 'split', now 'drop'" in capsys.readouterr().err
    assert packed("--long", "drop", "--overwrite")[0] == 0
    assert packed(source=tmp_path / "packed", name="again")[0] == 2
    assert "is packed already, into bins of 128 tokens" in capsys.readouterr().err
    assert packed(source=tmp_path / "nowhere", name="again")[0] == 2
    assert "there is no dataset at" in capsys.readouterr().err
