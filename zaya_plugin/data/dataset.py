# SPDX-License-Identifier: Apache-2.0
"""What training needs of the data room: `load_manifest`, `check_dataset`, and the datasets of a run from blends."""

import hashlib
import os
from collections.abc import Callable, Sequence

from zaya_plugin.data.check import DatasetWarning, check_dataset, locate
from zaya_plugin.data.indexed_format import stored_tokens
from zaya_plugin.data.manifest import NAME as MANIFEST_NAME
from zaya_plugin.data.manifest import Manifest, load_manifest

__all__ = [
    "Blend",
    "DatasetWarning",
    "Manifest",
    "build_gpt_datasets",
    "build_stream",
    "check_dataset",
    "load_manifest",
    "locate",
    "packed_length",
    "refuse_other_length",
    "resolve_blend",
]

# One path, several taken in proportion to their sizes, or (weight, path) pairs; weights are relative, their sum is free.
Blend = str | os.PathLike | Sequence[str | os.PathLike] | Sequence[tuple[float, str | os.PathLike]]


def resolve_blend(blend: Blend | None, split: str) -> tuple[list[str], list[float] | None] | None:
    """Prefixes and weights in Megatron's form; a directory of `zaya data prepare` becomes its "train" or "valid" prefix.

    Args:
        split: "train" or "valid", the one to take of a prepared directory. A dataset prepared without split is all "train".

    Raises:
        ValueError: a path is no dataset or lacks the split, a weight is not positive, or only some paths have weights.

    Paths without weights get their numbers of tokens as weights.
    """
    if blend is None:
        return None
    entries = [blend] if isinstance(blend, str | os.PathLike) else list(blend)
    if not entries:
        return None
    weighted = [not isinstance(entry, str | os.PathLike) for entry in entries]
    if any(weighted) != all(weighted):
        raise ValueError(f"blend {entries!r}: give a weight to every dataset or to none")
    if not all(weighted):
        prefixes = [prefix_of(entry, split) for entry in entries]
        # Left to Megatron, several datasets without weights end after one epoch, however many samples are asked for.
        return prefixes, [float(stored_tokens(prefix)) for prefix in prefixes] if len(prefixes) > 1 else None
    weights = [float(weight) for weight, _ in entries]
    if not all(0 < weight < float("inf") for weight in weights):
        raise ValueError(f"blend {entries!r}: weights must be positive numbers; leave out a dataset that is not wanted")
    return [prefix_of(path, split) for _, path in entries], weights


def prefix_of(path: str | os.PathLike, split: str) -> str:
    """The prefix of one split of a prepared directory; of a prefix, itself. See `resolve_blend`."""
    _, prefixes = locate(path)
    if not os.path.isfile(os.path.join(path, MANIFEST_NAME)):
        return next(iter(prefixes.values()))  # a prefix was named, and so the split is chosen already
    if split == "train" and "text" in prefixes:
        return prefixes["text"]
    if split not in prefixes:
        raise ValueError(
            f"{path} has no {split} split (it has {', '.join(prefixes)}); prepare it with --valid-fraction, or name a prefix"
        )
    return prefixes[split]


def packed_length(path: str | os.PathLike) -> int | None:
    """Tokens of a bin of a set made by `zaya data pack`; None for any other dataset."""
    manifest, _ = locate(path)
    return manifest.packing.sequence_length if manifest is not None and manifest.packing is not None else None


def refuse_other_length(path: str | os.PathLike, sequence_length: int) -> None:
    """Raises ValueError if a packed set has bins of another length than the run's sequences: they would be cut anywhere."""
    length = packed_length(path)
    if length not in (None, sequence_length):
        raise ValueError(
            f"{path} is packed into bins of {length} tokens, and the run has sequences of {sequence_length}: set "
            f"stage.seq_length={length}, or pack the data with `zaya data pack --sequence-length {sequence_length}`"
        )


def build_gpt_datasets(
    train_prefixes: Blend,
    valid_prefixes: Blend | None,
    num_samples: tuple[int, int, int],
    *,
    sequence_length: int,
    seed: int,
    tokenizer,
    cache_path: str | None,
    test_prefixes: Blend | None = None,
    reset_position_ids: bool = False,
    reset_attention_mask: bool = False,
    eod_mask_loss: bool = False,
    create_attention_mask: bool = False,
    is_built_on_rank: Callable[[], bool] = lambda: True,
    **config,
) -> list:
    """Builds the GPTDatasets of a run through Megatron's BlendedMegatronDatasetBuilder; every rank must call it.

    Args:
        train_prefixes, valid_prefixes, test_prefixes: what to draw from, see `Blend` and `resolve_blend`.
        num_samples: sequences to draw for train, valid and test, over as many epochs as it takes; 0 builds no dataset.
        sequence_length: tokens of a sample; `tokens` and `labels` are int64 [sequence_length].
        seed: of the document and sample order.
        tokenizer: a Megatron tokenizer; its vocabulary must cover the data.
        cache_path: where Megatron keeps its sample indices, here in a folder named after the contents of the datasets,
            because Megatron's own key is the path alone and data that was prepared again would meet the old indices.
            None: beside the data.
        create_attention_mask: leave it off where the attention makes its own causal mask.
        config: further fields of megatron.core.datasets.gpt_dataset.GPTDatasetConfig.

    Returns:
        [train, valid, test]; None for a split without prefixes or samples.

    Raises:
        ValueError: see `check_dataset`; or samples are asked for of a split that has no prefixes.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    from zaya_plugin.data.packed_dataset import BinGPTDataset

    blends = [
        resolve_blend(train_prefixes, "train"),
        resolve_blend(valid_prefixes, "valid"),
        resolve_blend(test_prefixes, "valid"),
    ]
    for name, count, index in zip(("train", "valid", "test"), num_samples, range(3), strict=True):
        if count and blends[index] is None:
            raise ValueError(
                f"{count} {name} samples are asked for, and there is no {name} data; name a dataset or ask for 0"
            )
        if not count:
            blends[index] = None
    if not any(blends):
        raise ValueError(f"num_samples {num_samples} asks for no sample of any split")
    prefixes = sorted({prefix for blend in blends if blend for prefix in blend[0]})
    for prefix in prefixes:
        refuse_other_length(prefix, sequence_length)
    if _rank() == 0:
        eod_id = tokenizer.eod if hasattr(tokenizer, "eod") else None
        for prefix in prefixes:
            check_dataset(prefix, tokenizer.vocab_size, eod_id=eod_id)
    if cache_path is not None:
        cache_path = os.path.join(cache_path, content_name(prefixes))
    dataset_config = GPTDatasetConfig(
        random_seed=seed,
        sequence_length=sequence_length,
        blend_per_split=blends,
        tokenizer=tokenizer,
        path_to_cache=cache_path,
        reset_position_ids=reset_position_ids,
        reset_attention_mask=reset_attention_mask,
        eod_mask_loss=eod_mask_loss,
        create_attention_mask=create_attention_mask,
        **config,
    )
    return BlendedMegatronDatasetBuilder(BinGPTDataset, list(num_samples), is_built_on_rank, dataset_config).build()


def build_stream(
    train_prefixes: Blend,
    samples: int,
    sequence_length: int,
    seed: int,
    tokenizer,
    cache_path: str,
    consumed: dict[str, int],
):
    """The training samples of one stage, going on where earlier stages stopped; see zaya_plugin.data.stream_dataset.

    Args:
        train_prefixes: see `Blend`.
        samples: of the whole stage, on which the order within its stretch of each source depends.
        consumed: tokens read before, by source; see zaya_plugin.data.ledger.
    """
    from zaya_plugin.data.ledger import resolve_entries, stage_use
    from zaya_plugin.data.stream_dataset import StreamDataset

    one = isinstance(train_prefixes, str | os.PathLike)
    entries = [
        os.fspath(entry) if isinstance(entry, str | os.PathLike) else f"{entry[0]!r} {os.fspath(entry[1])}"
        for entry in ([train_prefixes] if one else train_prefixes)
    ]
    prefixes, weights = resolve_entries(entries)
    if _rank() == 0:
        for prefix in prefixes:
            check_dataset(prefix, tokenizer.vocab_size, eod_id=tokenizer.eod)
    uses = stage_use(entries, samples, sequence_length, consumed, seed)
    return StreamDataset(uses, weights, sequence_length, seed, tokenizer.eod, cache_path)


def _rank() -> int:
    import torch

    return (
        torch.distributed.get_rank() if torch.distributed.is_available() and torch.distributed.is_initialized() else 0
    )


def content_name(prefixes: list[str]) -> str:
    """16 hexadecimal digits that name the contents: checksums where a manifest has them, else sizes and modification times."""
    digest = hashlib.sha256()
    for prefix in prefixes:
        manifest, splits = locate(prefix)
        if manifest is not None:
            record = manifest.splits[next(iter(splits))]
            digest.update(f"{record.bin_sha256} {record.idx_sha256}\n".encode())
        else:
            for suffix in (".bin", ".idx"):
                stat = os.stat(prefix + suffix)
                digest.update(f"{stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
