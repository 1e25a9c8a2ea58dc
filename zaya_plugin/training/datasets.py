# SPDX-License-Identifier: Apache-2.0
"""From a recipe's `data` group to a tokenizer and data sets."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.dataset import Blend, Manifest, build_gpt_datasets, check_dataset, locate
from zaya_plugin.data.tokenizer import vocabulary_of


@dataclass(frozen=True)
class DataSources:
    """What is read. train, valid: see zaya_plugin.data.dataset.Blend; valid None means no validation.
    tokenizer: path or name of a Hugging Face tokenizer; cache_path: folder of the sample indices."""

    train: Blend
    valid: Blend | None
    tokenizer: str
    cache_path: str

    def tokenizer_arguments(self) -> dict[str, Any]:
        """Megatron's arguments of the tokenizer."""
        return dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=self.tokenizer)

    def build(self, num_samples, sequence_length: int, seed: int, tokenizer) -> list:
        """Megatron's [train, valid, test] data sets for `num_samples` of each; there is no test set."""
        train, valid, _ = num_samples
        return build_gpt_datasets(
            self.train,
            self.valid,
            (train, valid if self.valid is not None else 0, 0),
            sequence_length=sequence_length,
            seed=seed,
            tokenizer=tokenizer,
            cache_path=self.cache_path,
        )


def find_sources(recipe: Recipe) -> DataSources:
    """Resolve and check what the recipe trains on; quick, and without torch.

    Raises:
        ValueError: a path is missing, an index is damaged, a blend entry is malformed, no tokenizer is known, the
            tokenizer does not fit the data, or validation is asked for and there is no data for it.
    """
    data = recipe.data
    manifest, splits = locate(data.path)
    tokenizer, vocab_size = data.tokenizer, None
    if tokenizer is None:
        if manifest is None:
            raise ValueError(
                f"data.tokenizer is null and {data.path} has no manifest that names one: set data.tokenizer to a "
                "Hugging Face tokenizer's path or name, or prepare the data with `zaya data prepare`"
            )
        tokenizer, vocab_size = str(_directory(data.path) / "tokenizer"), manifest.tokenizer.vocab_size
    else:
        vocab_size = vocabulary_of(tokenizer)
    valid = _validation(recipe, manifest, splits)
    blend = [_blend_entry(entry) for entry in data.blend]
    for path in [data.path, *(path for _, path in blend), *([valid] if valid else [])]:
        check_dataset(path, vocab_size)
    return DataSources(blend or data.path, valid, tokenizer, data.cache_path or str(_directory(data.path) / "cache"))


def _validation(recipe: Recipe, manifest: Manifest | None, splits: dict[str, str]) -> str | None:
    if not recipe.stage.eval_iters:
        return None
    if recipe.data.valid_path or "valid" in splits:
        return recipe.data.valid_path or splits["valid"]
    raise ValueError(
        f"stage.eval_iters={recipe.stage.eval_iters} asks for validation and {recipe.data.path} holds out no part for it: "
        "set data.valid_path, prepare the data with --valid-fraction, or set stage.eval_iters=0"
    )


def _directory(path: str) -> Path:
    return Path(path) if os.path.isdir(path) else Path(path).parent


def _blend_entry(entry: str) -> tuple[float, str]:
    weight, _, path = entry.strip().partition(" ")
    try:
        value = float(weight)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf") or not path.strip():
        raise ValueError(f"data.blend holds {entry!r}; an entry is a positive weight, a blank and a path: '0.7 data/web'")
    return value, path.strip()
