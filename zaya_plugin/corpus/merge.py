# SPDX-License-Identifier: Apache-2.0
"""Joins the parts into one indexed dataset per split and counts its tokens on the way."""

import hashlib
import os
from collections.abc import Iterable

import numpy as np

from zaya_plugin.corpus.parts import Part
from zaya_plugin.data.indexed_format import write_index
from zaya_plugin.data.manifest import SplitRecord, file_sha256


def merge_split(
    parts: Iterable[Part],
    split: str,
    directory: str,
    dtype: np.dtype,
    vocab_size: int,
    kept: list[np.ndarray] | None = None,
) -> SplitRecord:
    """Writes and syncs `<directory>/<split>.bin` and `.idx`; holds one part and 4 bytes a document in memory.

    Args:
        kept: which documents of the split to take of each part, bool [documents]; None takes all.
    """
    prefix = os.path.join(directory, split)
    occurrences, digest, lengths = np.zeros(vocab_size, np.int64), hashlib.sha256(), []
    with open(prefix + ".bin", "wb") as out:
        for number, part in enumerate(parts):
            tokens, part_lengths = part.tokens(split)
            if kept is not None:
                tokens, part_lengths = tokens[np.repeat(kept[number], part_lengths)], part_lengths[kept[number]]
            out.write(tokens.data)
            digest.update(tokens.data)
            occurrences += np.bincount(tokens, minlength=vocab_size)
            lengths.append(part_lengths)
        out.flush()
        os.fsync(out.fileno())
    all_lengths = np.concatenate(lengths) if lengths else np.empty(0, np.int32)
    write_index(prefix + ".idx", dtype, all_lengths)
    used = np.flatnonzero(occurrences)
    return SplitRecord(
        documents=len(all_lengths),
        tokens=int(occurrences.sum()),
        max_token_id=int(used[-1]) if len(used) else -1,
        unigram_entropy=unigram_entropy(occurrences),
        bin_bytes=os.path.getsize(prefix + ".bin"),
        bin_sha256=digest.hexdigest(),
        idx_bytes=os.path.getsize(prefix + ".idx"),
        idx_sha256=file_sha256(prefix + ".idx"),
    )


def unigram_entropy(occurrences: np.ndarray) -> float:
    """Entropy of the token distribution in nats/token: the least loss of a model that knows frequencies and no context."""
    total = occurrences.sum()
    if total == 0:
        return 0.0
    p = occurrences[occurrences > 0] / total
    return float(-(p * np.log(p)).sum())
