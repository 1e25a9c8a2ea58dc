# SPDX-License-Identifier: Apache-2.0
"""Documents that cannot be used: each is named with file and line, counted, and kept in rejected.jsonl."""

import gzip
import json

import pytest

from zaya_plugin.data.prepared import load_manifest

GOOD = b'{"text": "a good line"}'
BROKEN = {
    b'{"text": "cut': "not JSON: Unterminated string",
    b'{"body": "x", "id": 1}': "no field 'text'; it has 'body', 'id'",
    b'{"text": ["x"]}': "field 'text' is not a string but list",
    b'{"text": null}': "field 'text' is not a string but NoneType",
    b'["text"]': "not a JSON object but list",
    b'{"text": "\xff\xfe"}': "invalid UTF-8: byte 0xff at offset 10",
    b'{"text": "half \\ud83d"}': "field 'text' holds a lone surrogate at character 5",
    b'{"text": ' + b"[" * 100_000: "not JSON: maximum recursion depth",
    b'{"text": ' + b"1" * 5000 + b"}": "not JSON: Exceeds the limit",
    b'{"text": "' + b"x" * 200_000 + b'"}': "longer than --max-document-bytes 150000",
}


@pytest.fixture
def broken(tmp_path):
    """A broken line after every good one; then an empty text, white space and a blank line."""
    lines = [line for bad in BROKEN for line in (GOOD, bad)]
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join([*lines, b'{"text": ""}', b'{"text": " \\n"}', b"", GOOD]) + b"\n")
    return path


@pytest.mark.parametrize("options", [["--workers", 1], ["--workers", 2, "--part-bytes", 40]])
def test_every_broken_line_is_named_and_counted(tmp_path, broken, run, capfd, options, read_tokens):
    output = tmp_path / "out"
    command = [
        "--input",
        broken,
        "--output",
        output,
        "--train-bpe",
        260,
        "--valid-fraction",
        0,
        "--max-document-bytes",
        150_000,
        *options,
    ]
    assert run(*command) == 0
    listed = [json.loads(line) for line in (output / "rejected.jsonl").read_text().splitlines()]
    assert [(reject["file"], reject["line"]) for reject in listed] == [
        (str(broken), 2 * number + 2) for number in range(len(BROKEN))
    ]
    for reject, (line, reason) in zip(listed, BROKEN.items(), strict=True):
        assert reject["reason"].startswith(reason)
        assert reject["excerpt"] == line.decode("utf-8", "backslashreplace")[:200]
    assert load_manifest(output).documents == {"read": 23, "empty": 2, "rejected": 10, "blank_lines": 1}
    documents = read_tokens(output / "text")
    assert len(documents) == 11 and all(document == documents[0] for document in documents)
    out, err = capfd.readouterr()
    assert [line for line in err.splitlines() if line.startswith("rejected: ")][
        0
    ] == f"rejected: {broken}:2: {listed[0]['reason']}"
    assert "2 empty, 10 rejected" in out


def test_only_the_first_are_printed(tmp_path, run, capsys):
    (tmp_path / "in.jsonl").write_bytes(b"nonsense\n" * 37 + GOOD)
    assert (
        run(
            "--input",
            tmp_path / "in.jsonl",
            "--output",
            tmp_path / "out",
            "--train-bpe",
            260,
            "--valid-fraction",
            0,
            "--quiet",
        )
        == 0
    )
    err = capsys.readouterr().err.splitlines()
    assert (
        len(err) == 11
        and err[9].startswith(f"rejected: {tmp_path}/in.jsonl:10: ")
        and err[10].startswith("rejected: 27 more")
    )
    assert len((tmp_path / "out" / "rejected.jsonl").read_text().splitlines()) == 37


def test_max_rejects_fails_and_the_same_run_goes_on_with_a_higher_limit(tmp_path, broken, run, capsys):
    command = [
        "--input",
        broken,
        "--output",
        tmp_path / "out",
        "--train-bpe",
        260,
        "--valid-fraction",
        0,
        "--max-document-bytes",
        150_000,
    ]
    assert run(*command, "--max-rejects", 9) == 2
    error = capsys.readouterr().err
    assert "--max-rejects=9: 10 documents are rejected" in error and not (tmp_path / "out").exists()
    rejects_file = error.strip().removesuffix(".").rsplit(" ", 1)[1]
    assert len(open(rejects_file).readlines()) == 10
    assert run(*command, "--max-rejects", 10) == 0
    assert "already finished" in capsys.readouterr().err
    assert run(*command, "--max-rejects", 9) == 2  # complete, and still more than this caller accepts
    assert "--max-rejects=9: " in capsys.readouterr().err


def test_text_files_that_cannot_be_read(tmp_path, run):
    root = tmp_path / "in"
    root.mkdir()
    (root / "a.txt").write_bytes(b"first\nsecond \xe9\n")
    (root / "b.txt").write_bytes(b"x" * 5000)
    (root / "c.txt").write_bytes(b" \n")
    (root / "d.txt").write_bytes(b"fine")
    (root / "e.txt").symlink_to(root / "d.txt")
    with open(root / "f.txt.gz", "wb") as stream:
        stream.write(gzip.compress(b"cut short" * 99)[:20])
    command = [
        "--input",
        root,
        "--glob",
        "*.txt",
        "--glob",
        "*.gz",
        "--max-document-bytes",
        4000,
        "--train-bpe",
        260,
        "--valid-fraction",
        0,
    ]
    assert run(*command, "--output", tmp_path / "out") == 0
    listed = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [(reject["file"].rsplit("/", 1)[1], reject["line"]) for reject in listed] == [
        ("a.txt", 2),
        ("b.txt", 1),
        ("f.txt.gz", 1),
    ]
    assert [reject["reason"][:24] for reject in listed] == [
        "invalid UTF-8: byte 0xe9",
        "longer than --max-docume",
        "cannot be read: Compress",
    ]
    assert load_manifest(tmp_path / "out").documents == {"read": 6, "empty": 1, "rejected": 3, "blank_lines": 0}


@pytest.mark.parametrize("options", [[], ["--part-bytes", 3000]])
def test_damaged_gzip_keeps_what_comes_before(tmp_path, run, options, texts, read_tokens):
    packed = gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    (tmp_path / "a.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    (tmp_path / "b.jsonl").write_bytes(GOOD)
    command = [
        "--input",
        tmp_path / "a.jsonl.gz",
        tmp_path / "b.jsonl",
        "--output",
        tmp_path / "out",
        "--train-bpe",
        300,
        "--valid-fraction",
        0,
    ]
    assert run(*command, *options) == 0
    (listed,) = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    manifest = load_manifest(tmp_path / "out")
    kept = manifest.splits["text"].documents - 1
    assert 90 < kept < 200 and listed["line"] == kept + 1 and listed["file"].endswith("a.jsonl.gz")
    assert "damaged gzip stream" in listed["reason"] and manifest.documents["rejected"] == 1
    assert len(read_tokens(tmp_path / "out" / "text")[-1]) > 2


def test_line_longer_than_a_part_is_cut_without_losing_count(tmp_path, run):
    long = b'{"text": "' + b"y" * 30_000 + b'"}'
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([GOOD, long, GOOD, b"broken", long]))
    command = [
        "--input",
        tmp_path / "in.jsonl",
        "--output",
        tmp_path / "out",
        "--train-bpe",
        260,
        "--valid-fraction",
        0,
    ]
    assert run(*command, "--part-bytes", 100, "--max-document-bytes", 1000) == 0
    listed = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [reject["line"] for reject in listed] == [2, 4, 5]
    assert load_manifest(tmp_path / "out").splits["text"].documents == 2
