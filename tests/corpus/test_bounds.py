# SPDX-License-Identifier: Apache-2.0
"""Sizes on the command line of `zaya data` are checked first, and broken files are one message; ranges of numbers are
tested by tests/commands/test_option_ranges.py.
"""

import numpy as np
import pytest

from zaya_plugin import cli
from zaya_plugin.corpus import pack
from zaya_plugin.data.tokenizer import describe, open_tokenizer
from zaya_plugin.ground.exit_codes import USER_ERROR


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("pack", ["--sequence-length", "1000000000000"]),
        ("prepare", ["--train-bpe", "10000000000"]),
        ("prepare", ["--workers", "1000000"]),
        ("prepare", ["--part-bytes", "1T"]),
        ("prepare", ["--max-document-bytes", "1T"]),
    ],
)
def test_sizes_are_checked_first(prepared, tmp_path, command, words):
    source = [str(prepared)] if command == "pack" else []
    assert cli.main(["data", command, *words, "--output", str(tmp_path / "out"), *source]) == USER_ERROR
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("markers", [("", ""), (" ", "x"), ("a", ""), ("same", "same")])
def test_markers_that_are_empty_or_equal_are_refused(prepared, tmp_path, capsys, markers):
    words = [str(prepared), "--sequence-length", "64", "--output", str(tmp_path / "out"), "--trim-reasoning", *markers]
    assert cli.main(["data", "pack", *words]) == USER_ERROR
    assert "--trim-reasoning=" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_packing_takes_memory_by_items():
    bin_of, bins = pack.best_fit_decreasing(np.array([3, 1 << 23, (1 << 23) - 1, 2]), pack.LONGEST_BIN)
    assert bins == 2 and np.bincount(bin_of).tolist() == [2, 2]


@pytest.mark.parametrize("content", [b"", b"\x00\xff\xfe", b"{", b"[]", b'{"eos_token": {}, "model": {}}', b"null"])
def test_a_broken_tokenizer_is_one_message(prepared, tmp_path, capsys, content):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        for other in ("tokenizer.json", "tokenizer_config.json"):
            (folder / other).write_bytes((prepared / "tokenizer" / other).read_bytes())
        (folder / name).write_bytes(content)
        for command in ("check", "inspect"):
            assert cli.main(["data", command, str(prepared / "train"), "--tokenizer", str(folder)]) == USER_ERROR
            assert f"{name}: " in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot be read"):
        open_tokenizer(str(tmp_path))
    with pytest.raises(ValueError, match=r"tokenizer\.json: cannot be read"):
        describe(str(tmp_path / "nowhere"), "x")


def test_files_of_a_wrong_kind_are_one_message(prepared, tmp_path, capsys):
    (tmp_path / "binary.jsonl").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "folder.jsonl").mkdir()
    (tmp_path / "file").write_text("x")
    out = ["--output", str(tmp_path / "out"), "--train-bpe", "300", "--workers", "1"]
    cases = [
        ("prepare", ["--input", str(tmp_path / "binary.jsonl"), *out]),
        ("prepare", ["--input", str(tmp_path / "folder.jsonl"), *out]),
        ("prepare", ["--input", "stdlib", "--output", str(tmp_path / "file" / "out"), "--max-bytes", "1000"]),
        ("inspect", [str(tmp_path / "binary")]),
        ("inspect", [str(tmp_path / "folder.jsonl")]),
        ("check", [str(tmp_path / "file")]),
    ]
    for command, words in cases:
        assert cli.main(["data", command, *words]) == USER_ERROR, words
        error = capsys.readouterr().err
        assert error.startswith("zaya: ") or "\nzaya: " in error
