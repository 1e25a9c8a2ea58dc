# SPDX-License-Identifier: Apache-2.0
"""Documents that cannot be used: each is named with file and line, counted, and kept in rejected.jsonl."""

import gzip
import json
import os

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
    b'{"text": "half \\ud83d"}': "holds a lone surrogate behind 'half '",
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
    command = ["--input", root, "--max-document-bytes", 4000, "--train-bpe", 260, "--valid-fraction", 0]
    assert run(*command, "--output", tmp_path / "out") == 0
    listed = [json.loads(line) for line in (tmp_path / "out" / "rejected.jsonl").read_text().splitlines()]
    assert [(reject["file"].rsplit("/", 1)[1], reject["line"]) for reject in listed] == [("a.txt", 2), ("b.txt", 1)]
    assert [reject["reason"][:24] for reject in listed] == ["invalid UTF-8: byte 0xe9", "longer than --max-docume"]
    assert load_manifest(tmp_path / "out").documents == {"read": 4, "empty": 1, "rejected": 2, "blank_lines": 0}


@pytest.mark.parametrize("options", [["--train-bpe", 300], ["--part-bytes", 3000, "--workers", 2, "--max-rejects", 99]])
def test_a_lost_file_is_an_error_and_no_rejected_document(tmp_path, run, prepared, options, texts, capfd):
    """Noticed when the tokenizer is trained, which is then not kept, or later. Restored as they were, the same command goes on; left out, it needs --overwrite, as any
    other input.
    """
    packed = gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts).encode())
    files = {"a.jsonl": GOOD, "b.jsonl.gz": packed, "c.txt.gz": gzip.compress(b"cut short" * 99), "d.jsonl": GOOD}
    paths = [tmp_path / name for name in files]
    for path, data in zip(paths, files.values(), strict=True):
        half = len(data) // 2
        path.write_bytes(data[:half] + bytes(len(data) - half) if path.suffix == ".gz" else data)
        os.utime(path, (1, 1))
    options += [] if "--train-bpe" in options else ["--tokenizer", prepared / "tokenizer"]
    command = ["--input", *paths, "--valid-fraction", 0, *options, "--output", tmp_path / "out"]
    assert run(*command) == 2 and not (tmp_path / "out").exists()
    err = capfd.readouterr().err
    line = int(err.partition(f"zaya: --input={paths[1]}:")[2].partition(":")[0])
    assert 90 < line < len(texts) and f"{paths[1]}:{line}: damaged gzip stream: " in err and "rejected: " not in err
    assert "this file cannot be read to its end" in err and "Traceback" not in err
    paths[1].write_bytes(packed)
    os.utime(paths[1], (1, 1))
    assert run(*command) == 2 and not (tmp_path / "out").exists()
    assert f"zaya: --input={paths[2]}:1: damaged gzip stream: " in capfd.readouterr().err
    paths[2].write_bytes(files["c.txt.gz"])
    os.utime(paths[2], (1, 1))
    assert run(*command) == 0
    assert load_manifest(tmp_path / "out").documents["read"] == len(texts) + 3
    assert run(*command[:-1], tmp_path / "undisturbed") == 0
    names = ("text.bin", "text.idx", "tokenizer/tokenizer.json")
    assert [(tmp_path / "out" / n).read_bytes() for n in names] == [
        (tmp_path / "undisturbed" / n).read_bytes() for n in names
    ]


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
