# SPDX-License-Identifier: Apache-2.0
"""`zaya data bundle`: the documents of all shards, in order; the same bytes after an interruption."""

import json
import os

import pytest

from zaya_plugin import cli
from zaya_plugin.corpus import bundle
from zaya_plugin.corpus.bin_writer import BinWriter
from zaya_plugin.data.prepared import check_dataset, load_manifest


@pytest.fixture(scope="module")
def shards(tmp_path_factory, prepared, texts, run):
    directory = tmp_path_factory.mktemp("shards")
    for number in range(3):
        lines = [json.dumps({"text": text}) + "\n" for text in texts[number * 60 : number * 60 + 60]]
        (directory / "in.jsonl").write_text("".join(lines))
        command = ["--input", directory / "in.jsonl", "--tokenizer", prepared / "tokenizer", "--valid-fraction", 0.2]
        assert run(*command, "--output", directory / f"shard-{number}", "--quiet") == 0
    return [str(directory / f"shard-{number}") for number in range(3)]


def test_documents_of_all_shards_in_order(shards, tmp_path, read_tokens, capsys):
    output = tmp_path / "out"
    assert cli.main(["data", "bundle", *shards, "--output", str(output)]) == 0
    for split in ("train", "valid"):
        assert read_tokens(output / split) == sum((read_tokens(f"{shard}/{split}") for shard in shards), [])
    assert check_dataset(output, 400, eod_id=0, full=True)["train"].documents > 100
    assert load_manifest(output).documents["read"] == 180
    out = capsys.readouterr().out
    assert "3 shards" in out and "in one file" in out and "documents in random order" in out
    assert cli.main(["data", "bundle", *shards, "--output", str(output), "--quiet"]) == 0
    assert cli.main(["data", "bundle", *shards[:2], "--output", str(output)]) == 2
    assert "shards: it was made with" in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_interrupted_bundle_leaves_nothing_in_the_way(shards, tmp_path, contents, monkeypatch, capsys):
    assert cli.main(["data", "bundle", *shards, "--output", str(tmp_path / "whole"), "--quiet"]) == 0
    monkeypatch.setattr(bundle, "COPIED_TOKENS", 1000)
    calls, write = [], BinWriter.write

    def interrupt(self, *given):
        write(self, *given)
        calls.append(self.tokens)
        if len(calls) == 7:
            raise KeyboardInterrupt

    monkeypatch.setattr(BinWriter, "write", interrupt)
    assert cli.main(["data", "bundle", *shards, "--output", str(tmp_path / "out"), "--quiet"]) == 130
    assert "the same command starts from the beginning" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert cli.main(["data", "bundle", *shards, "--output", str(tmp_path / "out"), "--quiet"]) == 0
    assert len(calls) > 8 and calls[7] == 1000
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


def test_bundle_of_packed_sets_stays_packed(shards, tmp_path, capsys):
    packed = []
    for number, shard in enumerate(shards):
        packed.append(str(tmp_path / f"packed-{number}"))
        assert cli.main(["data", "pack", shard, "--sequence-length", "128", "--output", packed[-1], "--quiet"]) == 0
    assert cli.main(["data", "bundle", *packed, "--output", str(tmp_path / "out"), "--quiet"]) == 0
    counts = [load_manifest(path).packing.counts["train"] for path in packed]
    joined = load_manifest(tmp_path / "out").packing
    assert joined.sequence_length == 128
    assert joined.counts["train"] == {key: sum(count[key] for count in counts) for key in counts[0]}
    capsys.readouterr()
    assert cli.main(["data", "bundle", shards[0], packed[1], "--dry-run"]) == 2
    assert "in length of bins (128 and None)" in capsys.readouterr().err


def test_planned_reads_and_what_cannot_be_bundled(shards, prepared, tmp_path, capsys):
    assert (
        cli.main(
            [
                "data",
                "bundle",
                *shards,
                "--dry-run",
                "--sequence-length",
                "64",
                "--global-batch-size",
                "8",
                "--step-seconds",
                "2",
            ]
        )
        == 0
    )
    head, _, documents, bins = capsys.readouterr().out.splitlines()
    assert "8 sequences of 64 tokens each 2 s" in head and documents.startswith("  documents in random order")
    # sigma = 1 + 4096 / (64 x 2 bytes), and 33 x 8 x 64 x 2 / 4096 pages in 2 s
    assert bins.split() == ["packed", "into", "bins", "1.00", "33.000", "4", "0.0%", "0.000", "s"]
    for arguments, message in (
        ([shards[0], shards[0], "--dry-run"], "is named twice"),
        ([shards[0], str(prepared / "train"), "--dry-run"], "must be a whole dataset"),
        ([shards[0], str(tmp_path / "none"), "--dry-run"], "there is no dataset"),
    ):
        assert cli.main(["data", "bundle", *arguments]) == 2
        assert message in capsys.readouterr().err
