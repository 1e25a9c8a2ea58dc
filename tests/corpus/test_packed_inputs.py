# SPDX-License-Identifier: Apache-2.0
"""Packed files, every name of JSON lines and Parquet give the dataset that plain lines give; damage and missing packages
are named, and so is what is left out of a folder.
"""

import bz2
import gzip
import json
import lzma
import os
import sys

import pytest

from zaya_plugin import cli
from zaya_plugin.corpus.blocks import BlockReader, Format, Position
from zaya_plugin.corpus.inputs import DAMAGE, endings, find_inputs, lines, unpacked
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


PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize(
    "name",
    [
        "in.ndjson",
        "in.JSONL",
        "in.ldjson",
        "in.jsonlines",
        "in.jl",
        "in.jsonl.bz2",
        "in.ndjson.XZ",
        "in.jl.GZ",
        "in.JSONL.ZSTD",
    ],
)
def test_every_name_and_packing_of_json_lines(tmp_path, zst, name, texts, plain, run, capsys):
    """Packed in two streams, as parallel compressors write them; with padding where it is allowed."""
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts[:120]).encode()
    pack = PACK.get(endings(name)[1], lambda some: some)
    padding = bytes(8) if name.endswith(("XZ", "GZ")) else b""
    packed = pack(data[:20_000]) + padding + pack(data[20_000:]) + padding
    (tmp_path / name).write_bytes(zst.read_bytes() if name.endswith("ZSTD") else packed)
    assert run("--input", tmp_path / name, "--output", tmp_path / "out", *OPTIONS) == 0
    assert data_files(tmp_path / "out") == data_files(plain)


@pytest.mark.parametrize("ending", [".gz", ".bz2", ".xz", ".zst"])
def test_damage_anywhere_is_noticed(tmp_path, zst, ending):
    """The libraries' own readers take damage at the beginning of a second stream for the end of the file."""
    zstandard = pytest.importorskip("zstandard")
    pack = PACK.get(ending, lambda data: zstandard.ZstdCompressor(write_checksum=True).compress(data))
    first, second = (pack(bytes(range(256)) * n) for n in (40, 50))
    path = tmp_path / f"a.txt{ending}"
    path.write_bytes(first + second)
    with open(path, "rb") as raw:
        assert len(unpacked(str(path), raw).read()) == 256 * 90
    for at in (0, 3, len(second) // 2):
        path.write_bytes(first + second[:at] + bytes([second[at] ^ 0x55]) + second[at + 1 :])
        with open(path, "rb") as raw, pytest.raises(DAMAGE):
            unpacked(str(path), raw).read()
    path.write_bytes((first + second)[:-1])
    with open(path, "rb") as raw, pytest.raises(EOFError, match="it ends within a frame"):
        unpacked(str(path), raw).read()


def test_a_long_window_of_zstandard_is_read(tmp_path, texts, plain, run):
    zstandard = pytest.importorskip("zstandard")
    parameters = zstandard.ZstdCompressionParameters(window_log=28, enable_ldm=True)
    pack = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # size unknown: the window is kept
    data = "".join(json.dumps({"text": text}) + "\n" for text in texts[:120]).encode()
    (tmp_path / "in.jsonl.zst").write_bytes(pack.compress(data) + pack.flush())
    assert zstandard.get_frame_parameters((tmp_path / "in.jsonl.zst").read_bytes()).window_size == 1 << 28
    assert run("--input", tmp_path / "in.jsonl.zst", "--output", tmp_path / "out", *OPTIONS) == 0
    assert data_files(tmp_path / "out") == data_files(plain)


def test_what_is_left_out_of_a_folder_is_listed(tmp_path, run, capsys):
    root, line = tmp_path / "in", b'{"text": "of %s"}\n'
    (root / "sub").mkdir(parents=True)
    (root / ".git").mkdir()
    for name in ("b.jsonl", "sub/c.NDJSON", "d.jl"):
        (root / name).write_bytes(line % name.encode())
    (root / "E.TXT").write_bytes(b"text")
    (root / "f.txt.gz").write_bytes(gzip.compress(b"packed"))
    for name in ("g.json", "h.json.gz", "i.CSV", "j.csv", "k.parquet.gz", "README"):
        (root / name).write_bytes(b"x")
    (root / "a-latest.jsonl").symlink_to(root / "b.jsonl")
    os.link(root / "d.jl", root / "sub" / "hard.jl")
    (root / "linked").symlink_to(root / "sub")
    (tmp_path / "elsewhere.txt").write_bytes(b"from elsewhere")
    (root / "z.txt").symlink_to(tmp_path / "elsewhere.txt")
    command = ["--train-bpe", 300, "--valid-fraction", 0]
    assert run("--input", root, "--output", tmp_path / "out", *command) == 0
    assert capsys.readouterr().err.splitlines()[0] == (
        f"left out of {root}: .csv (2), links to files that are read (2), .json (1), .json.gz (1), .parquet.gz (1), "
        "files without an ending (1), hidden folders (1), linked folders (1)"
    )
    found = [os.path.relpath(file.path, tmp_path) for file in find_inputs([str(root)])]
    assert found == ["in/E.TXT", "in/b.jsonl", "in/d.jl", "in/f.txt.gz", "in/sub/c.NDJSON", "in/z.txt"]
    assert load_manifest(tmp_path / "out").documents["read"] == 6
    told = []
    assert len(find_inputs([f"{root}/[a-d]*"], tell=told.append)) == 2
    assert told == [f"left out of {root}/[a-d]*: links to files that are read (1)"]
    (root / "y.txt").symlink_to(root / "nowhere")
    for given, message in (
        ([root / "b.jsonl", root / "a-latest.jsonl"], "a-latest.jsonl: is named twice"),
        (
            [root / "i.CSV"],
            "i.CSV: cannot be read: it holds a table. Allowed: text and .jsonl .ndjson .ldjson .jsonlines .jl, plain",
        ),
        ([root / "h.json.gz"], "cannot be read: it holds one JSON value, not a document a line"),
        ([root / "k.parquet.gz"], "cannot be read: it is packed twice"),
        ([root], "y.txt: is a link to a file that does not exist"),
    ):
        assert run("--input", *given, "--output", tmp_path / "new", *command) == 2
        assert message in capsys.readouterr().err


def test_a_file_that_holds_something_else_than_its_name_says_is_refused(tmp_path):
    line = b'{"text": "a line of JSON"}\n'
    packed = {"gzip": gzip.compress(line), "bzip2": bz2.compress(line), "xz": lzma.compress(line)}
    others = {
        "zstd": b"\x28\xb5\x2f\xfd" + bytes(20),
        "Parquet": b"PAR1" + bytes(20),
        "a zip archive": b"PK\3\4" + bytes(9),
    }
    for name, kind, right in (
        ("a.jsonl", "gzip", "a.jsonl.gz"),
        ("b.txt", "bzip2", "b.txt.bz2"),
        ("c.jsonl.gz", "xz", "c.jsonl.xz"),
        ("d.jsonl", "zstd", "d.jsonl.zst"),
        ("e.jsonl", "Parquet", "e.jsonl.parquet"),
        ("f.parq", "gzip", "f.gz"),
        ("g.txt", "a zip archive", "unpack it"),
    ):
        (tmp_path / name).write_bytes({**packed, **others}[kind])
        with pytest.raises(ValueError, match=f"and its first bytes are those of {kind}. Allowed: .* Fix: .*{right}"):
            find_inputs([str(tmp_path / name)])
    for name, fix in (("h.jsonl.gz", "a name that says what"), ("i.pq", "a name that says what")):
        (tmp_path / name).write_bytes(line)
        with pytest.raises(ValueError, match=f"first bytes are those of text. Allowed: .* Fix: {fix}"):
            find_inputs([str(tmp_path / name)])
    for name, data in (("shard.jsonl.1", line), ("shard", b"\xef\xbb\xbf" + line), ("shard.dat.gz", packed["gzip"])):
        (tmp_path / name).write_bytes(data)
        right = "shard.dat.jsonl.gz" if name.endswith("gz") else f"{name}.jsonl"
        with pytest.raises(ValueError, match=rf"its first line is a JSON object.* Fix: mv \S+ {tmp_path}/{right}, or"):
            find_inputs([str(tmp_path / name)])
    for name, data in (("k", b"{ no JSON }\n"), ("l.txt", line), ("m.gz", b""), ("n", b'{\n "a": 1}')):
        (tmp_path / name).write_bytes(data)
        assert len(find_inputs([str(tmp_path / name)])) == 1


def test_columns_of_dictionaries_and_views_are_read(tmp_path, texts, plain, run):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    for number, kind in enumerate((pa.dictionary(pa.int32(), pa.string()), pa.string_view(), pa.large_string())):
        table = pa.table({"text": pa.array(texts[:120]).cast(kind), "id": pa.array(texts[:120]).cast(kind)})
        pq.write_table(table, tmp_path / "in.parquet", row_group_size=50)
        command = ["--input", tmp_path / "in.parquet", "--output", tmp_path / str(number), "--deduplicate", "id"]
        assert run(*command, *OPTIONS) == 0
        assert data_files(tmp_path / str(number)) == data_files(plain)


@pytest.fixture
def parquet(tmp_path, texts):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    def write(rows, groups=7, **columns):
        pq.write_table(pa.table({"text": rows, **columns}), tmp_path / "in.parquet", row_group_size=groups)
        return tmp_path / "in.parquet"

    return write


def test_parquet_gives_the_same_dataset(tmp_path, parquet, texts, plain, run):
    output, source = tmp_path / "out", tmp_path / "in.pq"
    parquet(texts[:120]).rename(source)
    assert run("--input", source, "--output", output, *OPTIONS, "--workers", 2) == 0
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


def test_rows_and_columns_that_cannot_be_used_are_named(tmp_path, parquet, run, texts, capsys):
    def prepare(name, *options):
        command = ["--input", tmp_path / "in.parquet", tmp_path / "more.jsonl", "--output", tmp_path / name, *options]
        return run(*command, "--train-bpe", 300, "--valid-fraction", 0)

    def lost(name, *options):
        assert prepare(name, *options) == 2
        told = capsys.readouterr().err
        return told.removeprefix(f"zaya: --input={tmp_path / 'in.parquet'}:1: ").split(": this file")[0]

    (tmp_path / "more.jsonl").write_text(
        "".join(json.dumps({"text": text, "body": text}) + "\n" for text in texts[:20])
    )
    parquet([texts[0], None, texts[1]], number=[1, 2, 3])
    assert prepare("a") == 0
    rejected = [json.loads(line) for line in (tmp_path / "a" / "rejected.jsonl").read_text().splitlines()]
    assert [(reject["line"], reject["reason"]) for reject in rejected] == [(2, "field 'text' is null")]
    capsys.readouterr()
    assert lost("b", "--field", "body") == "no column 'body'; it has 'text', 'number'"
    parquet([1, 2])
    assert lost("c") == "column 'text' is not of strings but of int64"
    (tmp_path / "in.parquet").write_bytes(b"PAR1 nothing of the kind")
    assert lost("d").startswith("damaged Parquet file")


def test_missing_package_is_named(tmp_path, run, prepared, monkeypatch, capsys):
    output = ["--output", tmp_path / "new"]
    (tmp_path / "a.txt").write_text("some text")
    for package, command, fix in (
        (
            "tokenizers",
            lambda: run("--input", tmp_path / "a.txt", *output),
            "tokenizers, or pip install 'zaya_plugin[data]'",
        ),
        ("transformers", lambda: run("--tokenizer", prepared / "tokenizer", *output), "transformers"),
        (
            "tokenizers",
            lambda: cli.main(["data", "inspect", str(prepared)]),
            "tokenizers, or pip install 'zaya_plugin[data]'",
        ),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, package, None)
            assert command() == 2
        told = capsys.readouterr().err
        assert f"requires the package {package}, which is not installed" in told
        assert told.endswith(f" Fix: pip install {fix}.\n") and told.count("\n") == 1
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name, package in (("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")):
        (tmp_path / name).write_bytes(b"x")
        assert run("--input", tmp_path / name, "--output", tmp_path / "out") == 2
        assert (
            f"requires the package {package}, which is not installed. Fix: pip install {package}"
            in capsys.readouterr().err
        )
