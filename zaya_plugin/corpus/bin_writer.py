# SPDX-License-Identifier: Apache-2.0
"""Writes a .bin whose content is known beforehand, so that an interrupted run goes on behind what is known to be on disk."""

import hashlib
import json
import os

import numpy as np

from zaya_plugin.corpus.merge import unigram_entropy
from zaya_plugin.data.indexed_format import write_index
from zaya_plugin.data.manifest import SplitRecord, file_sha256

# Between two records of how far writing has got: what an interruption may cost.
SYNCED_BYTES = 64_000_000


class BinWriter:
    """Takes all tokens of `<target>.bin` from the first on, whatever an earlier run has written, and counts them.

    Args:
        vocab_size: every token must be below.
    """

    def __init__(self, target: str, dtype: np.dtype, vocab_size: int):
        self.target, self.dtype = target, np.dtype(dtype)
        self.occurrences, self.digest, self.tokens = np.zeros(vocab_size, np.int64), hashlib.sha256(), 0
        self.on_disk = _synced_tokens(target, self.dtype.itemsize)
        self.out = open(target + ".bin", "r+b" if self.on_disk else "wb")
        self.out.truncate(self.on_disk * self.dtype.itemsize)
        self.out.seek(self.on_disk * self.dtype.itemsize)

    def write(self, tokens: np.ndarray) -> None:
        """Appends token ids [tokens].

        Raises:
            ValueError: an id is not in the vocabulary.
        """
        counted = np.bincount(tokens, minlength=len(self.occurrences))
        if len(counted) > len(self.occurrences):
            raise ValueError(
                f"{self.target}.bin would hold token id {len(counted) - 1}, and the vocabulary has {len(self.occurrences)} entries"
            )
        self.occurrences += counted
        self.digest.update(tokens.data)
        new = tokens[min(max(self.on_disk - self.tokens, 0), len(tokens)) :]
        self.tokens += len(tokens)
        self.out.write(new.data)
        if (self.tokens - self.on_disk) * self.dtype.itemsize >= SYNCED_BYTES:
            self.record()

    def record(self) -> None:
        """Syncs what was written and notes how much that is."""
        self.out.flush()
        os.fsync(self.out.fileno())
        self.on_disk = max(self.on_disk, self.tokens)
        temporary = progress_file(self.target) + ".tmp"
        with open(temporary, "w", encoding="ascii") as record:
            json.dump({"tokens": self.on_disk}, record)
        os.replace(temporary, progress_file(self.target))

    def finish(self, lengths: np.ndarray, filling: dict[int, int] | None = None) -> SplitRecord:
        """Writes the index and describes the pair.

        Args:
            lengths: int32 [documents].
            filling: token ids and how many of each are no text, left out of the largest id and the entropy.
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


def progress_file(target: str) -> str:
    return target + ".progress.json"


def _synced_tokens(target: str, itemsize: int) -> int:
    """Tokens that are known to be on disk; 0 if none are, or the file is shorter than was recorded."""
    try:
        with open(progress_file(target), encoding="ascii") as record:
            tokens = int(json.load(record)["tokens"])
        return tokens if os.path.getsize(target + ".bin") >= tokens * itemsize else 0
    except (FileNotFoundError, ValueError, KeyError):
        return 0
