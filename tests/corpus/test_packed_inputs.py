# SPDX-License-Identifier: Apache-2.0
"""Zstandard and Parquet inputs give the dataset that plain lines give; damage and missing packages are named."""

import json

import pytest

from zaya_plugin.corpus.blocks import BlockReader, Format, Position
from zaya_plugin.corpus.inputs import find_inputs, lines, unpacked
from zaya_plugin.data.prepared import load_manifest

OPTIONS = ["--train-bpe", 300, "--valid-fraction", 0.2, "--part-bytes", 3000]


@pytest.fixture(scope="module")
def plain(tmp_path_factory, texts, run):
    directory = tmp_path_factory.mktemp("plain")
    (directory / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:120]))
    assert run("--input", directory / "in.jsonl", "--output", directory / "out", *OPTIONS) == 0
    return directory / "out"


def data_files(directory):
    return {name: (directory / name).read_bytes() for name in ("train.bin", "train.idx", "valid.bin", "valid.idx")}


@pytest.fixture
def zst(tmp_path, texts):
    """The lines in frames of 50, as parallel compressors write them."""
    zstandard = pytest.importorskip("zstandard")
    lines = [json.dumps({"text": text}) + "\n" for text in texts[:120]]
    frames = [zstandard.compress("".join(lines[at : at + 50]).encode()) for at in range(0, 120, 50)]
    (tmp_path / "in.jsonl.zst").write_bytes(b"".join(frames))
    return tmp_path / "in.jsonl.zst"


def test_zstandard_gives_the_same_dataset(tmp_path, zst, plain, run):
    assert run("--input", zst, "--output", tmp_path / "out", *OPTIONS) == 0
    assert data_files(tmp_path / "out") == data_files(plain)


def test_zstandard_lines_from_any_offset_and_damage(zst, texts):
    whole = "".join(json.dumps({"text": text}) + "\n" for text in texts[:120]).encode()
    (file,) = find_inputs([str(zst)], [])
    begin = whole.index(b"\n", 20_000) + 1
    found = list(lines(file, begin, 10**6))
    assert b"".join(line + b"\n" for line, *_ in found) == whole[begin:]
    assert sum(taken for _, taken, *_ in found) == len(whole) - begin and found[-1][2] == len(whole)
    data = zst.read_bytes()
    for damaged in (data[:-3], data[: len(data) // 2] + bytes(40) + data[len(data) // 2 + 40 :], data[:2]):
        zst.write_bytes(damaged)
        with open(zst, "rb") as raw, pytest.raises(EOFError):
            unpacked(str(zst), raw).read()


def test_damaged_zstandard_file_is_rejected_from_there_on(tmp_path, zst, run, texts):
    zst.write_bytes(zst.read_bytes()[:-3])
    assert run("--input", zst, "--output", tmp_path / "out", *OPTIONS) == 0
    rejected = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert len(rejected) == 1 and rejected[0]["reason"].startswith("damaged zstd stream, the rest of the file is lost")
    assert rejected[0]["line"] == load_manifest(tmp_path / "out").documents["read"] >= 101


@pytest.fixture
def parquet(tmp_path, texts):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    def write(rows, groups=7, **columns):
        pq.write_table(pa.table({"text": rows, **columns}), tmp_path / "in.parquet", row_group_size=groups)
        return tmp_path / "in.parquet"

    return write


def test_parquet_gives_the_same_dataset(tmp_path, parquet, texts, plain, run):
    output = tmp_path / "out"
    assert run("--input", parquet(texts[:120]), "--output", output, *OPTIONS, "--workers", 2) == 0
    assert data_files(output) == data_files(plain)


def test_parquet_can_be_read_on_from_any_row_and_stops_at_max_bytes(parquet, texts):
    files = find_inputs([str(parquet(texts[:50]))], [])
    limit = sum(len(text.encode()) for text in texts[:33])

    def rows(reader, at):
        while (found := reader.read(at)) is not None:
            block, at = found
            for piece in block.pieces:
                assert piece.first == 1 + texts.index(piece.records[0][0])
                yield from ((text, at) for text, _ in piece.records)

    straight = list(rows(BlockReader(files, 900, limit, Format()), Position()))
    assert [text for text, _ in straight] == texts[:33]
    for text, at in straight:
        anew = [text for text, _ in rows(BlockReader(files, 900, limit, Format()), at)]
        assert anew == texts[at.offset : 33] if at.file == 0 else anew == []


def test_rows_and_columns_that_cannot_be_used_are_named(tmp_path, parquet, run, texts):
    def rejected(name, *options):
        command = ["--input", tmp_path / "in.parquet", tmp_path / "more.jsonl", "--output", tmp_path / name, *options]
        assert run(*command, "--train-bpe", 300, "--valid-fraction", 0) == 0
        return [json.loads(line) for line in (tmp_path / name / "rejected.jsonl").read_text().splitlines()]

    (tmp_path / "more.jsonl").write_text(
        "".join(json.dumps({"text": text, "body": text}) + "\n" for text in texts[:20])
    )
    parquet([texts[0], None, texts[1]], number=[1, 2, 3])
    assert [(each["line"], each["reason"]) for each in rejected("a")] == [(2, "field 'text' is null")]
    assert rejected("b", "--field", "body")[0]["reason"] == (
        "no column 'body'; it has 'text', 'number'; the rest of the file is lost"
    )
    parquet([1, 2])
    assert "column 'text' is not of strings but of int64" in rejected("c")[0]["reason"]
    (tmp_path / "in.parquet").write_bytes(b"PAR1 nothing of the kind")
    assert rejected("d")[0]["reason"].startswith("damaged Parquet file")


def test_missing_package_is_named(tmp_path, run, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, package in (("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")):
        (tmp_path / name).write_bytes(b"x")
        assert run("--input", tmp_path / name, "--output", tmp_path / "out") == 2
        assert f"the package {package} is not installed. Fix: pip install {package}" in capsys.readouterr().err
