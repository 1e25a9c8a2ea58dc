# SPDX-License-Identifier: Apache-2.0
"""Resolve a recipe's `data` group to a tokenizer and datasets. No torch import until the datasets are built."""

import contextlib
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from zaya_plugin.config.entries import Blend, BlendEntry, parse_blend
from zaya_plugin.config.schedule import sample_count
from zaya_plugin.config.schema import MISSING, DataConfig, Recipe
from zaya_plugin.data.blend import domain_names, resolve_blend
from zaya_plugin.data.fingerprint import fingerprint
from zaya_plugin.data.indexed_dataset import stored_tokens
from zaya_plugin.data.ledger import parse_ledger
from zaya_plugin.data.prepared import (
    check_dataset,
    holds_chats,
    locate,
    packed_length,
    prefix_of,
    refuse_other_length,
    tokenizer_of,
)
from zaya_plugin.data.tokenizer import check_name, tokenizer_digest, vocabulary_size
from zaya_plugin.ground.errors import mistake

# Rows of ZAYA1-base's table, for recipes whose data does not exist yet.
DEFAULT_VOCABULARY = 262_272


@dataclass(frozen=True)
class DataSources:
    """Data of a run.

    train, valid: see zaya_plugin.data.blend.Blend; valid None means no validation.
    tokenizer: path or name of a Hugging Face tokenizer; cache_path: folder of the sample indices.
    consumed: ledger of the stages before (zaya_plugin.data.ledger), None for Megatron's own order.
    domains: weights of the sources of data.valid_blend by name, in order; empty without one.
    """

    train: Blend
    valid: Blend | None
    tokenizer: str
    cache_path: str
    consumed: dict[str, int] | None = None
    domains: dict[str, float] = field(default_factory=dict)

    def tokenizer_arguments(self) -> dict[str, Any]:
        """Return Megatron's arguments of the tokenizer."""
        return dict(tokenizer_type="HuggingFaceTokenizer", tokenizer_model=self.tokenizer)

    @property
    def special_tokens(self) -> bool | None:
        """Whether the texts of training got the tokens that the tokenizer adds (bos). None: of chats, in which the
        template decides, or not known.
        """
        manifests = [locate(path)[0] for path in resolve_blend(self.train, "train")[0] if not holds_chats(path)]
        rules = [manifest.special_tokens for manifest in manifests if manifest is not None]
        return any(rules) if rules else None

    def facts(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of its data: the tokenizer's digest, the fingerprint of every dataset, and
        `special_tokens`.
        """
        splits = {"train": resolve_blend(self.train, "train"), "valid": resolve_blend(self.valid, "valid")}
        fingerprints = {name: {path: fingerprint(path) for path in blend[0]} for name, blend in splits.items() if blend}
        return {"tokenizer": tokenizer_digest(self.tokenizer), "special_tokens": self.special_tokens, **fingerprints}

    def build(self, num_samples, sequence_length: int, seed: int, tokenizer, validation: int | None = None) -> list:
        """Build Megatron's [train, valid, test] datasets for `num_samples` of each; there is no test set.

        Args:
            validation: samples of one validation, which several domains share equally.
        """
        from zaya_plugin.data.dataset import InTurn, build_gpt_datasets, build_stream

        train, valid, _ = num_samples
        valid = valid if self.valid is not None else 0
        if valid and len(self.domains) > 1:
            count = len(self.domains)
            assert validation % count == 0 and valid % validation == 0, "eval_iters counts all domains"
            alone = [replace(self, valid=prefix, domains={}) for _, prefix in self.valid]
            parts = [one.build((0, valid // count, 0), sequence_length, seed, tokenizer)[1] for one in alone]
            trained = self.build((train, 0, 0), sequence_length, seed, tokenizer)[0] if train else None
            return [trained, InTurn(parts, validation // count), None]
        built = dict(sequence_length=sequence_length, seed=seed, tokenizer=tokenizer, cache_path=self.cache_path)
        if not train or self.consumed is None:
            return build_gpt_datasets(self.train, self.valid, (train, valid, 0), **built)
        stream = build_stream(self.train, train, consumed=self.consumed, **built)
        held_out = build_gpt_datasets(self.train, self.valid, (0, valid, 0), **built)[1] if valid else None
        return [stream, held_out, None]


def compare_data(before: dict[str, Any] | None, now: dict[str, Any] | None, checkpoint: Path, data: DataConfig) -> str:
    """Compare the facts of the data with those that a checkpoint keeps (earlier versions did not). Return a warning
    about what differs with data.changed=accept, or nothing.

    Raises:
        ValueError: they differ, and data.changed=refuse.
    """
    if not before or not before.get("tokenizer") or now is None or not (different := changes(before, now)):
        return ""
    problem = f"{checkpoint} was trained on other data: {'; '.join(different)}"
    if data.changed != "accept":
        fix = "the data of the checkpoint, data.changed=accept, or a new run_dir"
        raise mistake("data.changed", "refuse", problem=problem, allowed="accept, or the same data", fix=fix)
    return f"WARNING: {problem}; data.changed=accept"


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return in which facts of the data two starts of a run differ; a dataset may have moved. A part that only one of
    them has is no difference.
    """
    differences = []
    if before.get("tokenizer") != now.get("tokenizer"):
        differences.append(f"the tokenizer was {before.get('tokenizer')} and is {now.get('tokenizer')}")
    for name in ("train", "valid"):
        was, has = before.get(name), now.get(name)
        if was and has and list(was.values()) != list(has.values()):
            one, other = (", ".join(f"{path} ({value})" for path, value in part.items()) for part in (was, has))
            differences.append(f"the {name} data was {one} and is {other}")
    return differences + other_rule(before, now)


def other_rule(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return a line if the texts of only one of two starts got the tokens that the tokenizer adds."""
    was, has = before.get("special_tokens"), now.get("special_tokens")
    if None in (was, has) or was == has:
        return []
    return [
        f"its texts {'had' if was else 'had not'} the tokenizer's special tokens (bos), and now "
        f"{'have' if has else 'have not'}"
    ]


def find_sources(recipe: Recipe) -> DataSources:
    """Resolve and check the data of a recipe; quick, and without torch.

    Raises:
        ValueError: a path is missing, an index is damaged, a blend entry is malformed, no tokenizer is known, the
            tokenizer does not fit the data, or the recipe has validation steps without data for them.
    """
    data = recipe.data
    recorded = tokenizer_of(data.path, "data.path")
    if data.tokenizer is not None:
        check_name(data.tokenizer)
        tokenizer, vocab_size = data.tokenizer, vocabulary_size(data.tokenizer)
    elif recorded is not None:
        tokenizer, vocab_size = recorded[0], recorded[1].vocab_size
        if not os.path.isfile(os.path.join(tokenizer, "tokenizer.json")):
            raise mistake(
                "data.path", data.path, problem=f"{tokenizer}/tokenizer.json does not exist", fix="copy the data again"
            )
    else:
        raise mistake(
            "data.tokenizer",
            None,
            problem=f"{data.path} has no manifest that names its tokenizer",
            allowed="path or name of a Hugging Face tokenizer",
            fix="data.tokenizer=<path or name>, or prepare the data with `zaya data prepare`",
        )
    domains = parse_blend(data.valid_blend, "data.valid_blend", weighted=True)
    valid = _validation(recipe, domains)
    train = parse_blend(data.blend, "data.blend", weighted=True)
    named = named_datasets(recipe)
    rules: dict[bool, str] = {}
    for key, path, _ in named:
        manifest, _ = locate(path, key)
        if manifest is not None and not holds_chats(path):
            rules[manifest.special_tokens] = path
        if len(rules) > 1:
            raise mistake(
                key,
                path,
                problem=f"the documents of {rules[True]} hold the tokenizer's special tokens (bos), and those of "
                f"{rules[False]} do not",
                allowed="datasets with one value of special_tokens in manifest.json",
                fix=f"make {rules[False]} again with `zaya data prepare ... --overwrite`",
            )
        check_dataset(path, vocab_size)
        _refuse_other_tokenizer(key, path, tokenizer)
        if packed_length(path) is not None and data.packing != "documents":
            raise mistake(
                "data.packing",
                data.packing,
                problem=f"{path} is packed: each of its bins holds several documents, which are to be kept apart",
                allowed="documents",
                fix="data.packing=documents, or train on the dataset that it was packed from",
            )
        refuse_other_length(path, recipe.stage.seq_length)
        if packed_length(path) is None and holds_chats(path):
            length = recipe.stage.seq_length
            raise mistake(
                key,
                path,
                problem="holds chats that are not packed: sequences would cut them, and lose which tokens are answers",
                allowed="chats in bins",
                fix=f"zaya data pack {path} --sequence-length {length} --output {path}-{length}",
            )
    for key, path, split in named:
        if split is not None:
            _refuse_short(key, path, split, recipe.stage.seq_length)
    if data.consumed and data.order != "continuing":
        raise mistake(
            "data.consumed",
            list(data.consumed),
            problem="is not read",
            allowed=f"[] with data.order={data.order}",
            fix="data.order=continuing or data.consumed=[]",
        )
    home = data.path if os.path.isdir(data.path) else os.path.dirname(data.path)
    names = domain_names([entry.path for entry in domains]) if valid is not None else []
    return DataSources(
        train or data.path,
        valid,
        tokenizer,
        data.cache_path or os.path.join(home, "cache"),
        parse_ledger(data.consumed) if data.order == "continuing" else None,
        {name: entry.weight for name, entry in zip(names, domains, strict=False)},
    )


def damaged_data(recipe: Recipe) -> str | None:
    """Return what is wrong with the files of a recipe's data, or None."""
    try:
        find_sources(recipe)
    except ValueError as error:
        return str(error)
    return None


def named_datasets(recipe: Recipe) -> list[tuple[str, str, str | None]]:
    """Return key, path and split of each dataset of a recipe: data.path, the entries of data.blend, the validation
    data. split: "train" or "valid", None for a data.path that a blend replaces.
    """
    data, domains = recipe.data, parse_blend(recipe.data.valid_blend, "data.valid_blend", weighted=True)
    valid = _validation(recipe, domains)
    key = "data.valid_blend" if domains else "data.valid_path" if data.valid_path else "data.path"
    train = [("data.blend", entry.path, "train") for entry in parse_blend(data.blend, "data.blend", weighted=True)]
    held_out = [valid] if isinstance(valid, str) else [entry.path for entry in valid or []]
    first = ("data.path", data.path, None if train else "train")
    return [first, *train, *((key, path, "valid") for path in held_out)]


def _refuse_short(key: str, path: str, split: str, length: int) -> None:
    """Raise ValueError if one split of a dataset is shorter than one sequence of `length` tokens."""
    # A sequence that is no bin also needs the token after its last one.
    prefix, need = prefix_of(path, split), length + (packed_length(path) is None)
    if (tokens := stored_tokens(prefix)) < need:
        what, keys = ("training data", "data.path") if split == "train" else ("validation part", "data.valid_path")
        raise mistake(
            key,
            path,
            problem=f"the {what} {prefix} holds {tokens} tokens, and one sequence needs {need}",
            allowed=f"{what.split()[0]} data of at least {need} tokens (stage.seq_length={length})",
            fix=f"{keys}=<a larger dataset>, or "
            + ("a shorter stage.seq_length" if split == "train" else "stage.eval_iters=0"),
        )


def _refuse_other_tokenizer(key: str, path: str, tokenizer: str) -> None:
    """Raise ValueError if a dataset was made with another tokenizer than the run's; a name on the hub is compared by
    the sizes of the vocabularies alone.
    """
    recorded = tokenizer_of(path)
    if recorded is None or not all(
        os.path.isfile(os.path.join(at, "tokenizer.json")) for at in (recorded[0], tokenizer)
    ):
        return
    if tokenizer_digest(recorded[0]) != tokenizer_digest(tokenizer):
        raise mistake(
            key,
            path,
            problem=f"was made with another tokenizer ({recorded[0]}) than the run's ({tokenizer}): the same token ids "
            "are other text",
            allowed="datasets of one tokenizer",
            fix=f"zaya data prepare --tokenizer {tokenizer} ... makes it again",
        )


def training_samples(recipe: Recipe):
    """Build the training samples of a run in this process, those of its other stages with the same order included.

    Sample i of the stage is number `handover.first_sample` + i. Megatron's index is read from and kept in the run's
    cache.
    """
    from megatron.core.tokenizers import MegatronTokenizer

    sources, handover = find_sources(recipe), recipe.handover
    tokenizer = MegatronTokenizer.from_pretrained(sources.tokenizer, metadata_path={"library": "huggingface"})
    planned = max(handover.planned_samples or 0, handover.first_sample + sample_count(recipe))
    return sources.build((planned, 0, 0), recipe.stage.seq_length, recipe.seed, tokenizer)[0]


def _validation(recipe: Recipe, domains: list[BlendEntry]) -> Blend | None:
    data = recipe.data
    if domains and data.valid_path:
        raise mistake(
            "data.valid_path",
            data.valid_path,
            problem=f"data.valid_blend={list(data.valid_blend)} is set too",
            allowed="one of the two",
        )
    if not recipe.stage.eval_iters:
        return None
    if domains:
        return [BlendEntry(entry.weight, prefix_of(entry.path, "valid", "data.valid_blend")) for entry in domains]
    splits = locate(data.path)[1]
    if data.valid_path or "valid" in splits:
        return data.valid_path or splits["valid"]
    raise mistake(
        "stage.eval_iters",
        recipe.stage.eval_iters,
        problem=f"there is no validation data: {data.path} holds out no part for it",
        allowed="0, or more with data.valid_path, data.valid_blend or data prepared with --valid-fraction",
        fix="stage.eval_iters=0, or data.valid_path=<dataset>",
    )


def vocabulary_of(recipe: Recipe) -> int:
    """Return the vocabulary of the recipe's data where it can be read, else ZAYA1-base's."""
    with contextlib.suppress(ValueError):
        if recipe.data.path != MISSING and (recorded := tokenizer_of(recipe.data.path)) is not None:
            return recorded[1].vocab_size
    return DEFAULT_VOCABULARY


def padded(rows: int, divisor: int) -> int:
    """Return `rows` rounded up to a multiple of `divisor` (model.make_vocab_size_divisible_by)."""
    return -(-rows // divisor) * divisor
