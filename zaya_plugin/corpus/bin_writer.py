# SPDX-License-Identifier: Apache-2.0
"""Write one split, .bin and .idx, and count its tokens; an interrupted run continues behind the last synced token."""

import hashlib
import json
import os

import numpy as np

from zaya_plugin.corpus.workspace import write_whole
from zaya_plugin.data.indexed_dataset import write_index
from zaya_plugin.data.prepared import SplitRecord, file_sha256
from zaya_plugin.errors import mistake

# Bytes between two records of the progress: what an interruption may cost.
SYNCED_BYTES = 64_000_000


class BinWriter:
    """Writes `<target>.bin`. A resumed run gives it all tokens from the first on; those on disk are counted and not
    written again.

    Args:
        vocab_size: every token must be below.
    """

    def __init__(self, target: str, dtype: np.dtype | str, vocab_size: int):
        self.target, self.dtype = target, np.dtype(dtype)
        self.occurrences, self.digest, self.tokens = np.zeros(vocab_size, np.int64), hashlib.sha256(), 0
        self.on_disk = _synced_tokens(target, self.dtype.itemsize)
        self.out = open(target + ".bin", "ab")
        self.out.truncate(self.on_disk * self.dtype.itemsize)

    def write(self, tokens: np.ndarray) -> None:
        """Append token ids [tokens].

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        counted = np.bincount(tokens, minlength=len(self.occurrences))
        if len(counted) > len(self.occurrences):
            raise mistake(
                self.target + ".bin",
                problem=f"would hold token id {len(counted) - 1}, and the vocabulary has {len(self.occurrences)} "
                "entries",
            )
        self.occurrences += counted
        self.digest.update(tokens.data)
        new = tokens[min(max(self.on_disk - self.tokens, 0), len(tokens)) :]
        self.tokens += len(tokens)
        self.out.write(new.data)
        if (self.tokens - self.on_disk) * self.dtype.itemsize >= SYNCED_BYTES:
            self.record()

    def record(self) -> None:
        """Sync the file and record its tokens."""
        self.out.flush()
        os.fsync(self.out.fileno())
        self.on_disk = max(self.on_disk, self.tokens)
        write_whole(self.target + ".progress.json", json.dumps({"tokens": self.on_disk}).encode())

    def finish(self, lengths: np.ndarray, filling: dict[int, int] | None = None) -> SplitRecord:
        """Write the index; return the description of the pair.

        Args:
            lengths: int32 [documents].
            filling: for each token id how many are filling, which the largest id and the entropy leave out.
        """
        assert self.tokens == int(lengths.sum(dtype=np.int64))
        self.record()
        self.out.close()
        write_index(self.target + ".idx", self.dtype, lengths)
        occurrences = self.occurrences.copy()
        for token, count in (filling or {}).items():
            occurrences[token] -= count
        used = np.flatnonzero(occurrences)
        return SplitRecord(
            documents=len(lengths),
            tokens=self.tokens,
            max_token_id=int(used[-1]) if len(used) else -1,
            unigram_entropy=unigram_entropy(occurrences),
            bin_bytes=os.path.getsize(self.target + ".bin"),
            bin_sha256=self.digest.hexdigest(),
            idx_bytes=os.path.getsize(self.target + ".idx"),
            idx_sha256=file_sha256(self.target + ".idx"),
        )


def unigram_entropy(occurrences: np.ndarray) -> float:
    """Return the entropy of the token distribution in nats/token: the least loss of a model without context."""
    total = occurrences.sum()
    if total == 0:
        return 0.0
    p = occurrences[occurrences > 0] / total
    return float(-(p * np.log(p)).sum())


def _synced_tokens(target: str, itemsize: int) -> int:
    """Return the tokens known to be on disk; 0 without a record, or if the file is shorter than was recorded."""
    try:
        with open(target + ".progress.json", encoding="ascii") as record:
            tokens = int(json.load(record)["tokens"])
        return tokens if os.path.getsize(target + ".bin") >= tokens * itemsize else 0
    except (FileNotFoundError, ValueError, KeyError):
        return 0
