# SPDX-License-Identifier: Apache-2.0
"""Blends of datasets: resolve their entries to Megatron's prefixes and weights. No torch import."""

import hashlib
import os
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from zaya_plugin.config.entries import Blend, parse_blend
from zaya_plugin.data.indexed_dataset import stored_tokens
from zaya_plugin.data.prepared import locate, prefix_of
from zaya_plugin.ground.errors import mistake


def resolve_blend(blend: Blend | None, split: str) -> tuple[list[str], list[float] | None] | None:
    """Return prefixes and weights in Megatron's form; a prepared directory becomes the prefix of its `split`.

    Paths without weights get their numbers of tokens as weights. A single path has none.

    Args:
        split: "train" or "valid", see `prefix_of`.

    Raises:
        ValueError: a path is no dataset or lacks the split, or see `parse_blend`.
    """
    entries = parse_blend(blend)
    if not entries:
        return None
    prefixes = [prefix_of(entry.path, split) for entry in entries]
    if entries[0].weight is not None:
        return prefixes, [entry.weight for entry in entries]
    # Left to Megatron, several datasets without weights end after one epoch, for any number of requested samples.
    return prefixes, [float(stored_tokens(prefix)) for prefix in prefixes] if len(prefixes) > 1 else None


def content_name(prefixes: Sequence[str]) -> str:
    """Return 16 hexadecimal digits that name the contents: of checksums from a manifest, else of sizes and modification
    times.
    """
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


def domain_names(paths: Sequence[str]) -> list[str]:
    """Return a name for each source of a validation blend: the shortest end of its path that no other source has.

    Raises:
        ValueError: a path is listed twice, or two names are equal.
    """
    parts = [Path(path).parts for path in paths]
    if len(set(parts)) < len(parts):
        raise mistake(
            "data.valid_blend", ", ".join(paths), problem="a source is listed twice", fix="add up its weights"
        )
    alone = [next(n for n in count(1) if sum(other[-n:] == path[-n:] for other in parts) == 1) for path in parts]
    names = ["_".join(path[-n:]).strip("/") for path, n in zip(parts, alone, strict=True)]
    if len(set(names)) < len(names):
        raise mistake(
            "data.valid_blend",
            ", ".join(paths),
            problem=f"sources would share the names {', '.join(sorted(names))}",
            fix="rename a folder",
        )
    return names
