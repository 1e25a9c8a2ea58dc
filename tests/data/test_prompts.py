# SPDX-License-Identifier: Apache-2.0
"""The prompts of stage.sample_prompts: their tokens, and what a start refuses."""

import pytest

from zaya_plugin.config.schema import DataConfig, Recipe, StageConfig
from zaya_plugin.data.prompts import read_prompts
from zaya_plugin.data.sources import find_sources
from zaya_plugin.data.tokenizer import open_tokenizer


def read(prepared, file, length=128, tokens=32):
    stage = StageConfig(name="s", seq_length=length, sample_prompts=str(file), sample_tokens=tokens)
    recipe = Recipe(stage=stage, data=DataConfig(path=str(prepared)))
    return read_prompts(recipe, find_sources(recipe))


def test_each_line_is_a_prompt(prepared, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("def f(x):\n\n  Größe \n")
    prompts = read(prepared, file)
    assert prompts.texts == ["def f(x):", "  Größe "]
    tokenizer = open_tokenizer(str(prepared / "tokenizer"))
    assert prompts.tokens == [tokenizer.encode(text).ids for text in prompts.texts]


@pytest.mark.parametrize(
    ("content", "tokens", "problem"),
    [
        (None, 32, "is not a file"),
        (b" \n\n", 32, "holds no prompt"),
        (b"\xff", 32, "cannot be read .* Allowed: a text file in UTF-8"),
        (
            b"a\n" + b"word " * 200,
            32,
            r"prompt 2 \('word word.*'\) has 1,000 tokens.* from 1 to 96 tokens: .*=128 less",
        ),
        (b"word", 128, ".* from 1 to 0 tokens: .* Fix: stage.sample_tokens=32"),
    ],
)
def test_a_file_without_prompts_that_fit_is_refused(prepared, tmp_path, content, tokens, problem):
    file = tmp_path / "prompts.txt"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ValueError, match=f"stage.sample_prompts={file}: {problem}"):
        read(prepared, file, tokens=tokens)
