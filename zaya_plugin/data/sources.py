# SPDX-License-Identifier: Apache-2.0
"""From a recipe's `data` group to a tokenizer and data sets."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zaya_plugin.config.schema import Recipe
from zaya_plugin.data.blend import domain_names
from zaya_plugin.data.check import check_dataset, locate
from zaya_plugin.data.dataset import build_gpt_datasets, build_stream
from zaya_plugin.data.ledger import parse_ledger
from zaya_plugin.data.manifest import Manifest
from zaya_plugin.data.prefixes import Blend, packed_length, prefix_of, refuse_other_length
from zaya_plugin.data.tokenizer import vocabulary_of


@dataclass(frozen=True)
class DataSources:
    """What is read. train, valid: see zaya_plugin.data.prefixes.Blend; valid None means no validation.
    tokenizer: path or name of a Hugging Face tokenizer; cache_path: folder of the sample indices.
    consumed: ledger of the stages before (zaya_plugin.data.ledger), None for Megatron's own order.
    domains: weights of the sources of data.valid_blend by name, in order; empty without one."""

    train: Blend
    valid: Blend | None
    tokenizer: str
    cache_path: str
    consumed: dict[str, int] | None = None
    domains: dict[str, float] = field(default_factory=dict)

    def tokenizer_arguments(self) -> dict[str, Any]:
        """Megatron's arguments of the tokenizer."""
        return dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=self.tokenizer)

    def build(self, num_samples, sequence_length: int, seed: int, tokenizer, validation: int | None = None) -> list:
        """Megatron's [train, valid, test] data sets for `num_samples` of each; there is no test set.

        validation: samples of one validation, which several domains share equally.
        """
        train, valid, _ = num_samples
        valid = valid if self.valid is not None else 0
        if valid and len(self.domains) > 1:
            return self._build_domains(num_samples, sequence_length, seed, tokenizer, validation)
        stream = None
        if train and self.consumed is not None:
            stream = build_stream(self.train, train, sequence_length, seed, tokenizer, self.cache_path, self.consumed)
        if stream is not None and not valid:
            return [stream, None, None]
        datasets = build_gpt_datasets(
            self.train,
            self.valid,
            (0 if stream is not None else train, valid, 0),
            sequence_length=sequence_length,
            seed=seed,
            tokenizer=tokenizer,
            cache_path=self.cache_path,
        )
        return datasets if stream is None else [stream, *datasets[1:]]

    def _build_domains(self, num_samples, sequence_length: int, seed: int, tokenizer, validation: int) -> list:
        from zaya_plugin.data.validation_domains import InTurn

        train, valid, _ = num_samples
        count = len(self.domains)
        assert validation % count == 0 and valid % validation == 0, "eval_iters counts all domains"
        parts = []
        for _, prefix in self.valid:
            alone = replace(self, valid=prefix, domains={})
            parts.append(alone.build((0, valid // count, 0), sequence_length, seed, tokenizer)[1])
        trained = (
            replace(self, valid=None, domains={}).build((train, 0, 0), sequence_length, seed, tokenizer)[0]
            if train
            else None
        )
        return [trained, InTurn(parts, validation // count), None]


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
    held_out = [valid] if isinstance(valid, str) else [path for _, path in valid or []]
    for path in [data.path, *(path for _, path in blend), *held_out]:
        check_dataset(path, vocab_size)
        if packed_length(path) is not None and data.packing != "documents":
            raise ValueError(
                f"{path} is packed: bins hold several documents that are to be kept apart, and data.packing={data.packing}. "
                "Set data.packing=documents, or train on what it was packed from"
            )
        refuse_other_length(path, recipe.stage.seq_length)
    if data.consumed and data.order != "continuing":
        raise ValueError(
            f"data.consumed={list(data.consumed)} is read with data.order=continuing alone; set that, or leave it out"
        )
    consumed = parse_ledger(data.consumed) if data.order == "continuing" else None
    cache = data.cache_path or str(_directory(data.path) / "cache")
    domains = {}
    if data.valid_blend and valid is not None:
        entries = [_blend_entry(entry, "data.valid_blend") for entry in data.valid_blend]
        domains = dict(zip(domain_names([path for _, path in entries]), (weight for weight, _ in entries), strict=True))
    return DataSources(blend or data.path, valid, tokenizer, cache, consumed, domains)


def _validation(recipe: Recipe, manifest: Manifest | None, splits: dict[str, str]) -> Blend | None:
    data = recipe.data
    if data.valid_blend and data.valid_path:
        raise ValueError(
            f"data.valid_path={data.valid_path} and data.valid_blend={list(data.valid_blend)}: give one of them"
        )
    if not recipe.stage.eval_iters:
        return None
    if data.valid_blend:
        entries = [_blend_entry(entry, "data.valid_blend") for entry in data.valid_blend]
        return [(weight, prefix_of(path, "valid")) for weight, path in entries]
    if data.valid_path or "valid" in splits:
        return data.valid_path or splits["valid"]
    raise ValueError(
        f"stage.eval_iters={recipe.stage.eval_iters} asks for validation and {data.path} holds out no part for it: "
        "set data.valid_path or data.valid_blend, prepare the data with --valid-fraction, or set stage.eval_iters=0"
    )


def _directory(path: str) -> Path:
    return Path(path) if os.path.isdir(path) else Path(path).parent


def _blend_entry(entry: str, key: str = "data.blend") -> tuple[float, str]:
    weight, _, path = entry.strip().partition(" ")
    try:
        value = float(weight)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf") or not path.strip():
        raise ValueError(f"{key} holds {entry!r}; an entry is a positive weight, a blank and a path: '0.7 data/web'")
    return value, path.strip()
