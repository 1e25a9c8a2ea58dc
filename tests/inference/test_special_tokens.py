# SPDX-License-Identifier: Apache-2.0
"""Where the texts of training had no bos, none is added at inference, nor by the tokenizer of an export."""

import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tokenizers import Tokenizer, processors

from tests.inference.small import open_given
from tests.running import MICRO
from zaya_plugin import cli
from zaya_plugin.checkpoint import on_disk
from zaya_plugin.checkpoint.convert import importing
from zaya_plugin.checkpoint.convert.model_folder import copy_companions
from zaya_plugin.checkpoint.convert.torch_dist import CheckpointWriter
from zaya_plugin.config.compose import compose
from zaya_plugin.training.lifecycle import Lifecycle

BOS = 0


@pytest.fixture(scope="module")
def with_bos(published, tmp_path_factory):
    """The small published model, with a tokenizer whose post-processor puts a token before every text."""
    folder = tmp_path_factory.mktemp("bos") / "model"
    shutil.copytree(published, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = processors.TemplateProcessing("<|endoftext|> $A", special_tokens=[("<|endoftext|>", BOS)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def checkpoint_of_a_run(published, directory, facts):
    """Write the published model as a run's checkpoint. facts: of the run's data."""
    source = importing.open_source(published)
    writer = CheckpointWriter(directory, "test")
    for tensors in importing._files(source):
        writer.write(tensors, lambda count: None)
    arguments = {"bf16": False, "tokenizer_model": str(published), "zaya": {"version": "0", "data": facts}}
    return writer.finish(source.model.arguments() | arguments)


@pytest.mark.parametrize(
    ("facts", "added"), [({"special_tokens": False}, 0), ({}, 0), ({"special_tokens": True}, 1), (None, 0)]
)
def test_the_rule_of_the_data_is_that_of_generation_and_export(with_bos, tmp_path, capsys, facts, added):
    from transformers import AutoTokenizer

    checkpoint = checkpoint_of_a_run(with_bos, tmp_path / "checkpoints", facts)
    bare = Tokenizer.from_file(str(with_bos / "tokenizer.json")).encode("the cat", add_special_tokens=False).ids
    expected = [BOS] * added + bare
    opened = replace(open_given(checkpoint), bos=7)
    assert opened.tokens_of("the cat") == expected and opened.tokens_of("the cat", False) == bare
    assert opened.first == (7 if added else opened.stop[0]), "of lm-evaluation-harness, for a text without a context"
    assert cli.main(["checkpoint", "export", str(checkpoint), "--output", str(tmp_path / "export")]) == 0
    note = "note: the tokenizer adds no token to a text (bos), because the training data has none"
    assert (note in capsys.readouterr().out) == (not added)
    assert AutoTokenizer.from_pretrained(tmp_path / "export")("the cat").input_ids == expected
    assert open_given(tmp_path / "export").tokens_of("the cat") == expected


def test_a_stage_whose_texts_follow_another_rule_says_so(published, tmp_path):
    checkpoints = checkpoint_of_a_run(published, tmp_path / "checkpoints", {"special_tokens": False}).parent
    steps, recipe = on_disk.latest(checkpoints)[0], compose([*MICRO, "data.path=x", f"run_dir={tmp_path / 'run'}"])
    before = SimpleNamespace(checkpoints=checkpoints, steps=steps, recipe=recipe, tokens=0)
    for rule, lines in ((True, [f"note: {checkpoints}: its texts had not the "]), (False, []), (None, [])):
        lifecycle = Lifecycle(recipe)
        data = {"tokenizer": None, "special_tokens": rule}
        lifecycle.describe_into(SimpleNamespace(load=None, rank=0), before, data)
        assert [line.partition("tokenizer's special")[0] for line in lifecycle.changed] == lines


def test_a_published_model_follows_its_tokenizer(with_bos, tmp_path):
    expected = Tokenizer.from_file(str(with_bos / "tokenizer.json")).encode("the cat").ids
    imported = importing.import_model(importing.open_source(with_bos), tmp_path / "checkpoints")
    assert open_given(with_bos).tokens_of("the cat") == open_given(imported).tokens_of("the cat") == expected
    assert expected[0] == BOS
    behind = Tokenizer.from_file(str(with_bos / "tokenizer.json"))
    behind.post_processor = processors.TemplateProcessing(
        "<|endoftext|> $A <|endoftext|>", special_tokens=[("<|endoftext|>", BOS)]
    )
    opened = replace(open_given(with_bos), tokenizer=behind)
    assert opened.tokens_of("the cat") == expected, "an end of text behind a prompt would end it"


def test_what_a_tokenizer_saves_travels(tmp_path):
    """All chat templates and the vocabulary in the form of its class; nothing else of the folder."""
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    names = (
        *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
        *("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "qwen.tiktoken", "chat_template.jinja"),
        *("additional_chat_templates/tool_use.jinja", "generation_config.json", "chat_template.json", "source.spm"),
        *("tekken.json", "bpe.codes", "normalizer.json", "tokenization_own.py", "LICENSE", "NOTICE.txt"),
    )
    for name in (
        *names,
        "config.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "README.md",
        "pytorch_model.bin",
    ):
        (source / name).write_text("{}")
    copy_companions(source, target)
    copied = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert copied == set(names)


def test_named_chat_templates_come_through_import_and_export(published, tmp_path, capsys):
    from transformers import AutoTokenizer

    model, template = tmp_path / "model", "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    shutil.copytree(published, model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = {"default": template, "tool_use": template + "!"}
    tokenizer.save_pretrained(model)
    imported, exported = tmp_path / "imported", tmp_path / "exported"
    assert cli.main(["checkpoint", "import", str(model), "--output", str(imported)]) == 0
    assert cli.main(["checkpoint", "export", str(imported), "--output", str(exported)]) == 0
    for folder in (imported / "tokenizer", exported):
        assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
    capsys.readouterr()
    assert cli.main(["checkpoint", "import", str(model), "--output", "/proc/none/x"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("zaya: /proc/none: No such file or directory (") and told.count("\n") == 1
    assert told.endswith("then the same command again. The command continues behind the last whole file.\n")
