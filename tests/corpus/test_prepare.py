# SPDX-License-Identifier: Apache-2.0
"""The content of the dataset for every kind of input and option."""

import fcntl
import gzip
import json
import math
import os
import pty
import struct
import subprocess
import sys
import termios
from collections import Counter
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from zaya_plugin.corpus.part_files import split_of
from zaya_plugin.data.prepared import load_manifest
from zaya_plugin.data.tokenizer import train_bpe

REPOSITORY = Path(__file__).resolve().parents[2]


def encode(output, texts, eod=(0,)):
    tokenizer = Tokenizer.from_file(str(output / "tokenizer" / "tokenizer.json"))
    return [[*tokenizer.encode(text, add_special_tokens=False).ids, *eod] for text in texts]


def test_tokens_of_jsonl_in_order_with_eod_and_split(prepared, texts, read_tokens):
    expected = {name: [text for text in texts if split_of(text, 0.2) == name] for name in ("train", "valid")}
    assert len(expected["train"]) + len(expected["valid"]) == 300 and 30 < len(expected["valid"]) < 90
    for name, split_texts in expected.items():
        assert read_tokens(prepared / name) == encode(prepared, split_texts)


def test_manifest_agrees_with_the_files(prepared, texts, read_tokens):
    manifest = load_manifest(prepared)
    assert manifest.dtype == "uint16" and manifest.tokenizer.vocab_size == 400 and manifest.tokenizer.eod_id == 0
    assert manifest.documents == {"read": 300, "empty": 0, "rejected": 0, "blank_lines": 0}
    for name in ("train", "valid"):
        documents, split = read_tokens(prepared / name), manifest.splits[name]
        ids = [token for document in documents for token in document]
        assert (split.documents, split.tokens, split.max_token_id) == (len(documents), len(ids), max(ids))
        shares = [count / len(ids) for count in Counter(ids).values()]
        assert split.unigram_entropy == pytest.approx(-math.fsum(p * math.log(p) for p in shares), abs=1e-12)
        assert split.bin_bytes == 2 * len(ids) == (prepared / f"{name}.bin").stat().st_size


def test_no_leftovers_next_to_the_output(prepared):
    assert [path.name for path in prepared.parent.iterdir()] == ["out"]
    assert sorted(path.name for path in prepared.iterdir()) == [
        "manifest.json",
        "rejected.jsonl",
        "tokenizer",
        "train.bin",
        "train.idx",
        "valid.bin",
        "valid.idx",
    ]


def test_directory_of_text_is_recursive_sorted_and_filtered(tmp_path, run, read_tokens):
    root = tmp_path / "in"
    for name in ("b.txt", "a/z.md", "a/y.txt", "a.txt", ".hidden/x.txt", "skipped.bin"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(f"text of {name}\r\n".encode())
    (root / "bom.txt").write_bytes(b"\xef\xbb\xbfwith a mark")
    with gzip.open(root / "c.txt.gz", "wb") as stream:
        stream.write(b"packed")
    assert run("--input", root, "--output", tmp_path / "all", "--train-bpe", 258, "--valid-fraction", 0) == 0
    in_order = [
        "text of a.txt\r\n",
        "text of a/y.txt\r\n",
        "text of a/z.md\r\n",
        "text of b.txt\r\n",
        "with a mark",
        "packed",
    ]
    assert read_tokens(tmp_path / "all" / "text") == encode(tmp_path / "all", in_order)
    command = [
        "--input",
        root,
        "--glob",
        "*.md",
        "--glob",
        "*.gz",
        "--output",
        tmp_path / "some",
        "--train-bpe",
        258,
        "--valid-fraction",
        0,
    ]
    assert run(*command) == 0
    assert read_tokens(tmp_path / "some" / "text") == encode(tmp_path / "some", ["text of a/z.md\r\n", "packed"])


def test_field_gzip_pattern_and_several_inputs(tmp_path, run, texts, read_tokens):
    for number in range(3):
        with gzip.open(tmp_path / f"shard-{number}.jsonl.gz", "wt") as stream:
            stream.writelines(
                json.dumps({"content": text}, ensure_ascii=number == 0) + "\n"
                for text in texts[number * 20 : number * 20 + 20]
            )
    (tmp_path / "last.jsonl").write_text('\n{"content": "the last, without newline"}')
    output = tmp_path / "out"
    command = [
        "--input",
        f"{tmp_path}/shard-*.jsonl.gz",
        tmp_path / "last.jsonl",
        "--field",
        "content",
        "--output",
        output,
    ]
    assert run(*command, "--train-bpe", 300, "--valid-fraction", 0, "--part-bytes", 2000) == 0
    assert read_tokens(output / "text") == encode(output, [*texts[:60], "the last, without newline"])
    assert load_manifest(output).documents["blank_lines"] == 1


@pytest.mark.parametrize("options", [["--workers", 2], ["--part-bytes", 700], ["--part-bytes", 5000, "--workers", 2]])
def test_result_does_not_depend_on_workers_or_part_size(tmp_path, options, corpus, run, prepared, contents):
    assert (
        run(
            "--input",
            corpus,
            "--output",
            tmp_path / "out",
            "--train-bpe",
            400,
            "--valid-fraction",
            0.2,
            "--quiet",
            *options,
        )
        == 0
    )
    assert contents(tmp_path / "out") == contents(prepared)


def test_no_append_eod(tmp_path, corpus, run, texts, read_tokens):
    assert (
        run(
            "--input",
            corpus,
            "--output",
            tmp_path / "out",
            "--train-bpe",
            300,
            "--valid-fraction",
            0,
            "--no-append-eod",
        )
        == 0
    )
    assert read_tokens(tmp_path / "out" / "text") == encode(tmp_path / "out", texts, eod=())


def test_copies_of_a_document_stay_in_one_split():
    names = Counter(split_of(f"document {number}", 0.05) for number in range(20_000))
    assert names["valid"] == pytest.approx(1000, abs=100) and names["train"] == 20_000 - names["valid"]
    assert split_of("same", 0.5) == split_of("same", 0.5)
    assert {split_of(f"{number}", 0.05) for number in range(500) if split_of(f"{number}", 0.02) == "valid"} == {"valid"}


def test_tokenizer_does_not_see_validation_documents(tmp_path, run):
    held_out = next(f"zqxj{number}" for number in range(1000) if split_of(f"zqxj{number} " * 50, 0.5) == "valid")
    kept = [f"common words {number}" for number in range(60)]
    lines = [{"text": text} for text in [f"{held_out} " * 50, *kept]]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert (
        run("--input", tmp_path / "in.jsonl", "--output", tmp_path / "out", "--train-bpe", 400, "--valid-fraction", 0.5)
        == 0
    )
    vocabulary = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer" / "tokenizer.json")).get_vocab()
    assert "Ġwords" in vocabulary and not any("zq" in token for token in vocabulary)


def test_max_bytes_stops_before_the_document_that_does_not_fit(tmp_path, corpus, run, texts, read_tokens):
    lines = corpus.read_bytes().splitlines(keepends=True)
    for extra, documents in ((0, 7), (1, 7), (-1, 6)):
        output = tmp_path / f"out{extra}"
        limit = sum(map(len, lines[:7])) + extra
        assert (
            run(
                "--input",
                corpus,
                "--output",
                output,
                "--train-bpe",
                300,
                "--valid-fraction",
                0,
                "--max-bytes",
                limit,
                "--part-bytes",
                900,
            )
            == 0
        )
        assert read_tokens(output / "text") == encode(output, texts[:documents])
        assert load_manifest(output).input_bytes == sum(map(len, lines[:documents]))


def test_standard_library_is_the_default_and_skips_tests(tmp_path, run, capsys):
    assert run("--output", tmp_path / "out", "--max-bytes", "300K", "--valid-fraction", 0.3) == 0
    manifest = load_manifest(tmp_path / "out")
    assert manifest.tokenizer.vocab_size == 4096 and manifest.arguments["--input"] == ["stdlib"]
    assert 100_000 < manifest.input_bytes <= 300_000 and manifest.documents["rejected"] == 0
    out = capsys.readouterr().out
    assert (
        "MB/s with 1 worker" in out
        and f"{manifest.splits['train'].tokens:,} tokens" in out
        and "--max-bytes 300,000" in out
    )


def test_same_command_again_does_nothing(tmp_path, corpus, run, capsys):
    command = ["--input", corpus, "--output", tmp_path / "out", "--train-bpe", 300]
    assert run(*command) == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    capsys.readouterr()
    assert run(*command, "--workers", 2) == 0
    assert "already complete, nothing to do" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


def test_other_arguments_are_refused_by_name_and_overwrite_replaces(tmp_path, corpus, run, capsys, contents):
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(corpus.read_bytes())
    output = tmp_path / "out"
    assert run("--input", copy, "--output", output, "--train-bpe", 300) == 0
    before = contents(output)
    assert run("--input", copy, "--output", output, "--train-bpe", 310, "--field", "body") == 2
    error = capsys.readouterr().err
    assert (
        "--train-bpe: it was made with 300, now 310" in error
        and "--field: it was made with 'text', now 'body'" in error
    )
    assert "--overwrite" in error and "--valid-fraction" not in error
    with open(copy, "a") as stream:
        stream.write('{"text": "one more"}\n')
    assert run("--input", copy, "--output", output, "--train-bpe", 300) == 2
    assert "names or sizes have changed" in capsys.readouterr().err
    assert contents(output) == before
    assert run("--input", copy, "--output", output, "--train-bpe", 310, "--overwrite") == 0
    assert load_manifest(output).tokenizer.vocab_size == 310 and load_manifest(output).documents["read"] == 301
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.jsonl", "out"]
    copy.unlink()
    assert run("--input", copy, "--output", output, "--train-bpe", 310) == 0
    assert "already complete" in capsys.readouterr().out


def test_a_directory_of_others_is_never_replaced(tmp_path, corpus, run, capsys):
    for name in ("out", "new.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text("mine")
    assert run("--input", corpus, "--output", tmp_path / "out", "--overwrite") == 2
    assert "is not a dataset that this command may replace" in capsys.readouterr().err
    assert run("--input", corpus, "--output", tmp_path / "new", "--overwrite") == 2
    assert "is in the way" in capsys.readouterr().err
    assert [(tmp_path / name / "thesis.txt").read_text() for name in ("out", "new.partial")] == ["mine", "mine"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input", "nowhere.jsonl"], "nowhere.jsonl: does not exist"),
        (["--input", "{corpus}", "{corpus}"], "is named twice"),
        (["--input", "shard.jsonl.xz"], "shard.jsonl.xz:1: damaged xz stream: Input format not supported"),
        (
            ["--input", "folder"],
            "folder: no file in it matches *.txt *.md *.rst *.py *.jsonl *.ndjson *.ldjson *.jsonlines *.jl",
        ),
        (["--input", "folder"], "; it holds .json.gz (1). Allowed"),
        (["--input", "{corpus}", "--field", "body"], "is --field right?"),
        (
            ["--input", "{corpus}", "--field", "body", "--train-bpe", "300"],
            "corpus.jsonl:1: no field 'body'; it has 'id', 'text'",
        ),
        (["--input", "one.txt"], "--valid-fraction=0.05: the valid split is empty: 1 document in all"),
        (["--input", "empty"], "no file in it matches"),
        (["--input", "{corpus}", "--tokenizer", "empty"], "--tokenizer=empty: cannot be opened: "),
        (["--input", "pipe"], "must be a regular file, since an input is read more than once"),
    ],
)
def test_errors_that_name_the_cause(tmp_path, monkeypatch, corpus, run, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.txt").write_text("a single text " * 20)
    (tmp_path / "shard.jsonl.xz").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.json.gz").write_bytes(b"x")
    os.mkfifo(tmp_path / "pipe")
    train_bpe(["some text"], 258, str(tmp_path / "tiny"))
    options = [option.format(corpus=corpus) for option in options]
    assert (
        run(
            *options,
            "--output",
            "out",
            *([] if {"--tokenizer", "--train-bpe"} & set(options) else ["--tokenizer", "tiny"]),
        )
        == 2
    )
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob("out.lock*"))
    # Nothing is in the way of the corrected command.
    assert run("--input", corpus, "--tokenizer", "tiny", "--output", "out") == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--max-bytes", "4X"],
        ["--valid-fraction", "1.5"],
        ["--train-bpe", "100"],
        ["--workers", "0"],
        ["--max-rejects", "-1"],
        ["--max-bytes", "inf"],
    ],
)
def test_bad_values_are_refused_when_parsing(tmp_path, run, capsys, options):
    assert run("--output", tmp_path / "out", *options) == 2
    assert options[1] in capsys.readouterr().err


def test_help_teaches_and_loads_no_torch():
    code = (
        "import sys\n"
        "from zaya_plugin.cli import main\n"
        "try: main(['data', 'prepare', '--help'])\n"
        "finally: print({m for m in ('torch', 'megatron', 'transformers', 'tokenizers') if m in sys.modules}, "
        "file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "set()\n"
    assert "zaya data prepare --output data/demo" in done.stdout and "--max-rejects" in done.stdout


def test_quiet_prints_nothing_and_no_bar_without_terminal(tmp_path, corpus, run, capfd):
    assert run("--input", corpus, "--output", tmp_path / "out", "--train-bpe", 300, "--quiet") == 0
    assert capfd.readouterr() == ("", "")
    assert run("--input", corpus, "--output", tmp_path / "other", "--train-bpe", 300) == 0
    assert "tokenising" not in capfd.readouterr().err


def test_progress_bar_on_a_terminal(tmp_path, corpus):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [
        sys.executable,
        "-m",
        "zaya_plugin.cli",
        "data",
        "prepare",
        "--input",
        corpus,
        "--output",
        tmp_path / "out",
        "--train-bpe",
        "300",
        "--workers",
        "1",
    ]
    assert subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL, stderr=theirs).returncode == 0
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    os.close(theirs)
    assert "tokenising" in shown and "100%" in shown
