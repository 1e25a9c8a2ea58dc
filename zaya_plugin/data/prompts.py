# SPDX-License-Identifier: Apache-2.0
"""Prompts in a text file, one a line: of `zaya generate --prompts` and of stage.sample_prompts. No torch import."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.sources import DataSources
from zaya_plugin.data.tokenizer import added_tokens, any_tokenizer
from zaya_plugin.ground.errors import mistake

KEY = "stage.sample_prompts"


@dataclass(frozen=True)
class Prompts:
    """Prompts of a run: their texts and tokens, and the `tokenizers.Tokenizer`, which decodes what follows them."""

    texts: list[str]
    tokens: list[list[int]]
    tokenizer: Any


def lines_of(key: str, path: str) -> list[str]:
    """Return the lines of a UTF-8 file that are not blank; - is standard input. key: what names it in messages."""
    try:
        text = (sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise mistake(key, path, problem=f"cannot be read ({error})", allowed="a text file in UTF-8") from error
    return [line for line in text.splitlines() if line.strip()]


def read_prompts(recipe: Recipe, sources: DataSources) -> Prompts | None:
    """Return the prompts of stage.sample_prompts as the documents of the training data begin; None without the key.

    Raises:
        ValueError: the file cannot be read or has no prompt, or a prompt and its continuation exceed the context.
    """
    stage = recipe.stage
    if stage.sample_prompts is None:
        return None
    allowed = "a text file in UTF-8 with one prompt a line"
    if not Path(stage.sample_prompts).is_file():
        raise mistake(KEY, stage.sample_prompts, problem="is not a file", allowed=allowed, fix=f"{KEY}=null")
    if not (texts := lines_of(KEY, stage.sample_prompts)):
        raise mistake(KEY, stage.sample_prompts, problem="holds no prompt", allowed=allowed, fix=f"{KEY}=null")
    tokenizer = any_tokenizer(sources.tokenizer)
    leading = added_tokens(tokenizer)[0] if sources.special_tokens else []
    tokens = [[*leading, *tokenizer.encode(text, add_special_tokens=False).ids] for text in texts]
    room = stage.seq_length - stage.sample_tokens
    for number, (text, ids) in enumerate(zip(texts, tokens, strict=True), 1):
        if 0 < len(ids) <= room:
            continue
        fix = "a shorter prompt" if ids else "remove this line"
        raise mistake(
            KEY,
            stage.sample_prompts,
            problem=f"prompt {number} ({text[:40]!r}) has {len(ids):,} tokens",
            allowed=f"from 1 to {max(room, 0):,} tokens: stage.seq_length={stage.seq_length} less "
            f"stage.sample_tokens={stage.sample_tokens}",
            fix=fix if room > 0 else f"stage.sample_tokens={min(32, stage.seq_length // 2)}",
        )
    return Prompts(texts, tokens, tokenizer)
