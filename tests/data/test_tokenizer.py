# SPDX-License-Identifier: Apache-2.0
"""The tokenizer directory in transformers and Megatron, and tokenizers that come from Hugging Face."""

import json
import shutil

import pytest

from zaya_plugin import cli
from zaya_plugin.config.schema import DataConfig, Recipe, StageConfig
from zaya_plugin.corpus.part_files import split_of
from zaya_plugin.data.prepared import load_manifest
from zaya_plugin.data.sources import find_sources
from zaya_plugin.data.tokenizer import (
    added_tokens,
    any_tokenizer,
    check_name,
    describe,
    import_pretrained,
    open_tokenizer,
    tokenizer_digest,
    train_bpe,
)

SAMPLE = "def größe(x):\n\treturn  x  # 日本語 🙂\r\n"


@pytest.fixture(scope="module")
def auto_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """A tokenizer like published ones: bos added in front, truncation and padding switched on, eos last, a hole in
    the ids.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    directory = tmp_path_factory.mktemp("foreign")
    vocabulary = {"<unk>": 0, "<bos>": 1, "a": 2, "b": 3, "c": 4, "d": 5, "<eos>": 9}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.add_special_tokens(["<bos>", "<eos>", "<unk>"])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=6, pad_id=0, pad_token="<unk>")
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def test_trained_tokenizer_in_transformers(prepared, texts, read_tokens, auto_tokenizer):
    tokenizer = auto_tokenizer(str(prepared / "tokenizer"))
    assert len(tokenizer) == 400 and (tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 1)
    assert tokenizer.decode(tokenizer(SAMPLE).input_ids) == SAMPLE
    in_train = [text for text in texts if split_of(text, 0.2) == "train"]
    assert read_tokens(prepared / "train") == [
        [*tokenizer(text).input_ids, tokenizer.eos_token_id] for text in in_train
    ]


def test_trained_tokenizer_in_megatron(prepared):
    from megatron.core.tokenizers import MegatronTokenizer

    tokenizer = MegatronTokenizer.from_pretrained(str(prepared / "tokenizer"), metadata_path={"library": "huggingface"})
    manifest = load_manifest(prepared)
    assert (tokenizer.vocab_size, tokenizer.eod, tokenizer.pad) == (
        manifest.tokenizer.vocab_size,
        manifest.tokenizer.eod_id,
        1,
    )
    assert tokenizer.detokenize(tokenizer.tokenize(SAMPLE)) == SAMPLE


def test_tokenizer_of_others(tmp_path, foreign, run, read_tokens, auto_tokenizer, capsys):
    documents = ["a b c d a b c d", "c <eos> d", "x"]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    output = tmp_path / "out"
    command = ["--input", tmp_path / "in.jsonl", "--output", output, "--tokenizer", foreign, "--valid-fraction", 0]
    assert run(*command) == 0 and "with the tokenizer's special tokens" in capsys.readouterr().out
    direct = auto_tokenizer(str(foreign))
    expected = [[*direct(text).input_ids, 9] for text in documents]
    assert read_tokens(output / "text") == expected == [[1, 2, 3, 4, 5, 2, 3, 4, 5, 9], [1, 4, 9, 5, 9], [1, 0, 9]]
    record = load_manifest(output).tokenizer
    assert (record.vocab_size, record.eod_id, record.eod_token, record.source) == (10, 9, "<eos>", str(foreign))
    assert load_manifest(output).special_tokens is True
    copied = auto_tokenizer(str(output / "tokenizer"))
    assert copied("a b").input_ids == direct("a b").input_ids == [1, 2, 3]
    (foreign / "tokenizer.json").write_text((foreign / "tokenizer.json").read_text() + "\n")
    assert run(*command) == 2
    assert "sha256 of its tokenizer.json" in capsys.readouterr().err


def test_one_rule_for_special_tokens(tmp_path, prepared, corpus, run, read_tokens, capsys):
    """A tokenizer that adds a bos: prepare adds it, the manifest says so, and every command keeps or compares the rule."""
    from tokenizers import processors

    tokenizer = open_tokenizer(str(prepared / "tokenizer"))
    bos = [("<|padding|>", 1)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<|padding|> $A", special_tokens=bos)
    shutil.copytree(prepared / "tokenizer", tmp_path / "tokenizer")
    tokenizer.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    command = ["--input", corpus, "--tokenizer", tmp_path / "tokenizer", "--valid-fraction", 0.2]
    with_bos, without, bins = tmp_path / "with", tmp_path / "without", tmp_path / "bins"
    assert run(*command, "--output", with_bos) == 0
    for split in ("train", "valid"):
        assert read_tokens(with_bos / split) == [[1, *ids] for ids in read_tokens(prepared / split)]
    assert not load_manifest(prepared).special_tokens and load_manifest(with_bos).special_tokens is True
    shutil.copytree(with_bos, without)
    record = json.loads((without / "manifest.json").read_text())
    del record["special_tokens"], record["checksum"]  # as earlier versions wrote it
    (without / "manifest.json").write_text(json.dumps(record))
    assert load_manifest(without).special_tokens is False
    assert cli.main(["data", "bundle", str(with_bos), str(without), "--dry-run"]) == 2
    assert f"{without}: differs from {with_bos} in special_tokens (False and True)" in capsys.readouterr().err
    for name in ("blend", "valid_blend"):
        data = DataConfig(path=str(with_bos), **{name: [f"1 {with_bos}", f"1 {without}"]})
        with pytest.raises(
            ValueError, match=f"data.{name}={without}.*: the documents of {with_bos}.* hold the tokenizer's"
        ):
            find_sources(Recipe(stage=StageConfig(name="s", seq_length=32), data=data))
    assert cli.main(["data", "pack", str(with_bos), "--sequence-length", "128", "--output", str(bins), "--quiet"]) == 0
    assert load_manifest(bins).special_tokens is True and read_tokens(bins / "train")[0][0] == 1
    for path, rule in ((bins, "true"), (without, "false")):
        assert cli.main(["data", "inspect", str(path), "--count", "1"]) == 0
        shown = capsys.readouterr().out
        assert f"; special_tokens={rule}\n" in shown and "  | <|padding|>" in shown


def test_added_tokens_and_an_end_of_document_that_the_tokenizer_adds(tmp_path, foreign, run, read_tokens):
    from tokenizers import processors

    shutil.copytree(foreign, tmp_path / "both")
    tokenizer = open_tokenizer(str(foreign))
    assert added_tokens(tokenizer) == ([1], [])
    both = [("<bos>", 1), ("<eos>", 9)]
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=both)
    assert added_tokens(tokenizer) == ([1], [9])
    tokenizer.save(str(tmp_path / "both" / "tokenizer.json"))
    (tmp_path / "in.jsonl").write_text('{"text": "a b"}\n')
    command = ["--input", tmp_path / "in.jsonl", "--tokenizer", tmp_path / "both", "--valid-fraction", 0]
    assert run(*command, "--output", tmp_path / "out") == 0 and read_tokens(tmp_path / "out" / "text") == [[1, 2, 3, 9]]
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <bos> $A", special_tokens=both[:1])
    with pytest.raises(ValueError, match="--tokenizer: its post-processor changes the tokens of a text"):
        added_tokens(tokenizer)


def test_tokenizer_without_eos_needs_no_append_eod(tmp_path, foreign, corpus, run, capsys):
    directory = tmp_path / "no_eos"
    directory.mkdir()
    (directory / "tokenizer.json").write_bytes((foreign / "tokenizer.json").read_bytes())
    (directory / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}'
    )
    command = ["--input", corpus, "--output", tmp_path / "out", "--tokenizer", directory]
    assert run(*command) == 2
    assert "has no eos_token" in capsys.readouterr().err
    assert run(*command, "--no-append-eod", "--overwrite") == 0
    assert load_manifest(tmp_path / "out").tokenizer.eod_id is None


def test_training_is_repeatable_and_may_end_early(tmp_path, texts):
    for name in "ab":
        train_bpe(iter(texts), 500, str(tmp_path / name))
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (tmp_path / "b" / "tokenizer.json").read_bytes()
    train_bpe(["too little to learn from"], 4000, str(tmp_path / "small"))
    assert 258 < describe(str(tmp_path / "small"), "").vocab_size < 300


def test_a_path_without_a_tokenizer_is_no_name_on_the_hub(prepared, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "empty").mkdir()
    for good in (prepared / "tokenizer", "gpt2", "Zyphra/ZAYA1-base"):
        check_name(str(good))
    for wrong in (tmp_path / "file", tmp_path / "empty", tmp_path / "nowhere", "a/b/c", "../tokenizer", "", "~/x"):
        with pytest.raises(ValueError, match=f"^data.tokenizer={wrong}: "):
            check_name(str(wrong))


def test_a_tokenizer_that_another_dataset_takes_over_stays_the_same_tokenizer(prepared, foreign, tmp_path):
    """As `zaya data prepare --tokenizer` writes it, for a blend with the dataset that it comes from."""
    for name, source in (("own", prepared / "tokenizer"), ("foreign", foreign)):
        import_pretrained(str(source), str(tmp_path / name))
        assert tokenizer_digest(str(tmp_path / name)) == tokenizer_digest(str(source))
    written = open_tokenizer(str(tmp_path / "foreign"))
    assert written.encode("a").ids != written.encode("a", add_special_tokens=False).ids, "its bos is no part of this"
    written.post_processor = None
    (tmp_path / "foreign" / "tokenizer.json").write_text(written.to_str(), "utf-8")
    assert tokenizer_digest(str(tmp_path / "foreign")) != tokenizer_digest(str(foreign))


def test_a_tokenizer_by_name_cuts_no_text_although_it_was_saved_so(foreign, auto_tokenizer, monkeypatch):
    """The fixture stands for a name on the Hub; it was saved with truncation to 4 tokens and padding to 6."""
    opened = auto_tokenizer(str(foreign))
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", lambda name, **_: opened)
    monkeypatch.setattr("zaya_plugin.data.tokenizer.unreachable", lambda: None)
    assert any_tokenizer("someone/theirs").encode("a b c d a", add_special_tokens=False).ids == [2, 3, 4, 5, 2]
    assert any_tokenizer("someone/theirs").encode("a", add_special_tokens=False).ids == [2]
