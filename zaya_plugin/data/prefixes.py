# SPDX-License-Identifier: Apache-2.0
"""From the datasets that a recipe names to Megatron's prefixes and weights. No torch import."""

import hashlib
import os
from collections.abc import Sequence

from zaya_plugin.data.check import locate
from zaya_plugin.data.indexed_format import stored_tokens
from zaya_plugin.data.manifest import NAME as MANIFEST_NAME

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
