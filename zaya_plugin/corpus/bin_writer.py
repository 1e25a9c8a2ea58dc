# SPDX-License-Identifier: Apache-2.0
"""Write one split, .bin, .idx and of chats .marks, and count its tokens."""

import hashlib
import os

import numpy as np

from zaya_plugin.data.fingerprint import MARKS, fingerprint
from zaya_plugin.data.indexed_dataset import write_index
from zaya_plugin.data.prepared import SplitRecord, file_sha256
from zaya_plugin.ground.errors import mistake


class BinWriter:
    """Writes `<target>.bin`.

    Args:
        vocab_size: every token must be below.
        marked: whether the tokens have marks (zaya_plugin.data.prepared.MARKS), in a file of their own.
    """

    def __init__(self, target: str, dtype: np.dtype | str, vocab_size: int, marked: bool = False):
        self.target, self.dtype = target, np.dtype(dtype)
        self.occurrences, self.digest, self.tokens = np.zeros(vocab_size, np.int64), hashlib.sha256(), 0
        self.out = open(target + ".bin", "wb")
        self.marks, self.marks_digest = open(target + MARKS, "wb") if marked else None, hashlib.sha256()

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        try:
            self.out.close()
        finally:
            if self.marks is not None:
                self.marks.close()

    def write(self, tokens: np.ndarray, marks: np.ndarray | None = None) -> None:
        """Append token ids [tokens], and their marks uint8 [tokens] if they have any.

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
        self.tokens += len(tokens)
        self.out.write(tokens.data)
        if self.marks is not None:
            self.marks_digest.update(marks.data)
            self.marks.write(marks.data)

    def finish(self, lengths: np.ndarray, filling: dict[int, int] | None = None) -> SplitRecord:
        """Write the index; return the description of the pair.

        Args:
            lengths: int32 [documents].
            filling: for each token id how many are filling, which the largest id and the entropy leave out.
        """
        assert self.tokens == int(lengths.sum(dtype=np.int64))
        self.__exit__()
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
            marks_sha256=self.marks_digest.hexdigest() if self.marks is not None else None,
            fingerprint=fingerprint(self.target),
        )


def unigram_entropy(occurrences: np.ndarray) -> float:
    """Return the entropy of the token distribution in nats/token: the least loss of a model without context."""
    total = occurrences.sum()
    if total == 0:
        return 0.0
    p = occurrences[occurrences > 0] / total
    return float(-(p * np.log(p)).sum())
