# SPDX-License-Identifier: Apache-2.0
"""`--deduplicate`: the first of equal documents stays, for any part size and number of workers."""

import json

import pytest

from zaya_plugin.corpus.part_files import split_of
from zaya_plugin.data.prepared import load_manifest


@pytest.fixture(scope="module")
def repeated(tmp_path_factory, texts):
    """Repeated texts, and repeated ids with other texts."""
    path = tmp_path_factory.mktemp("repeated") / "in.jsonl"
    lines = [{"id": f"d{number % 70}" if number % 3 else number, "text": texts[number % 90]} for number in range(150)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path, lines


@pytest.mark.parametrize("by", ["text", "id"])
def test_first_of_equal_documents_stays(tmp_path, repeated, run, read_tokens, contents, by):
    path, lines = repeated
    first = {}
    for line in lines:
        first.setdefault(str(line[by]), line["text"])
    found = {}
    for workers, part in ((1, 10**6), (2 if by == "id" else 1, 700)):
        output = tmp_path / f"out{part}"
        command = [
            "--input",
            path,
            "--output",
            output,
            "--train-bpe",
            300,
            "--valid-fraction",
            0.2,
            "--deduplicate",
            by,
        ]
        assert run(*command, "--workers", workers, "--part-bytes", part) == 0
        found[part] = contents(output)
    assert found[10**6] == found[700]
    manifest = load_manifest(tmp_path / "out700")
    assert manifest.documents["duplicates"] == 150 - len(first) > 25
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tmp_path / "out700" / "tokenizer" / "tokenizer.json"))
    for split in ("train", "valid"):
        expected = [tokenizer.encode(text).ids + [0] for text in first.values() if split_of(text, 0.2) == split]
        assert read_tokens(tmp_path / "out700" / split) == expected


def test_document_without_id_is_rejected(tmp_path, run, capsys):
    lines = [{"text": "a b c", "key": 1}, {"text": "no id"}, {"text": "x", "key": [1]}, {"text": "again", "key": "1"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [
        "--input",
        tmp_path / "in.jsonl",
        "--output",
        tmp_path / "out",
        "--train-bpe",
        300,
        "--valid-fraction",
        0,
    ]
    assert run(*command, "--deduplicate", "id", "--id-field", "key") == 0
    out, err = capsys.readouterr()
    assert (
        f"{tmp_path}/in.jsonl:2: field 'key', which --id-field names, is not a string or whole number but NoneType"
        in err
    )
    assert "2 rejected, 1 duplicates" in out and load_manifest(tmp_path / "out").splits["text"].documents == 1
