# SPDX-License-Identifier: Apache-2.0
"""A source as one endless stream of tokens: epoch after epoch, each with its documents in an order of its own.

How far a source has been read is then a single number, tokens, that holds whatever the sequence length, the blend and the
stage: who goes on from there repeats nothing and leaves nothing out. Samples of one stage are a stretch of the stream cut at
multiples of the sequence length, and are shuffled within that stretch (`stage_shuffle`).
"""

import fcntl
import os
from functools import lru_cache

import numpy as np

from zaya_plugin.data.indexed_reader import IndexedReader

# Samples shuffled with each other. Documents are in random order already; this parts the samples of one long document.
WINDOW = 1 << 16


class TokenStream:
    """Tokens of an indexed dataset by position in its stream.

    Args:
        prefix: of the `.bin`/`.idx` pair.
        identity: 16 hexadecimal digits that name the content; with `seed` they decide the order.
        cache_path: folder for the orders of epochs, 8 to 16 bytes a document each; all ranks map the same files.
    """

    def __init__(self, prefix: str, identity: str, seed: int, cache_path: str):
        self.reader, self.seed, self.cache_path = IndexedReader(prefix), seed, os.path.join(cache_path, identity)
        self.words = [int(identity[:8], 16), int(identity[8:16], 16)]
        self.epoch_tokens = self.reader.indexed.tokens
        self._epoch = lru_cache(maxsize=2)(self._open_epoch)

    def read(self, position: int, length: int) -> np.ndarray:
        """Token ids [length] from a position on, in the dtype of the file; may go over into the next epoch."""
        return np.concatenate([self.reader.stream[a:b] for a, b in self.ranges(position, length)])

    def ranges(self, position: int, length: int) -> list[tuple[int, int]]:
        """Where in .bin these tokens are, as (first, one past the last) in order."""
        found = []
        while length > 0:
            epoch, at = divmod(position, self.epoch_tokens)
            order, ends = self._epoch(epoch)
            rank = int(np.searchsorted(ends, at, "right"))
            while length > 0 and rank < len(order):
                document = int(order[rank])
                first = int(self.reader.starts[document + 1]) - (int(ends[rank]) - at)
                take = min(length, int(ends[rank]) - at)
                if take:
                    found.append((first, first + take))
                at, position, length, rank = at + take, position + take, length - take, rank + 1
        return found

    def _open_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Documents in order, and the tokens up to the end of each, int64 [documents]."""
        path = os.path.join(self.cache_path, f"epoch-{epoch}-seed-{self.seed}.npy")
        if not os.path.exists(path):
            os.makedirs(self.cache_path, exist_ok=True)
            with open(os.path.join(self.cache_path, "lock"), "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)  # one rank makes it, the others of the node wait
                if not os.path.exists(path):
                    self._make_epoch(epoch, path)
        both = np.load(path, mmap_mode="r")
        return both[0], both[1]

    def _make_epoch(self, epoch: int, path: str) -> None:
        # RandomState's streams are frozen by NumPy's compatibility policy; those of default_rng may change.
        order = np.random.RandomState([self.seed, 2, *self.words, epoch]).permutation(len(self.reader))
        both = np.stack([order, np.cumsum(self.reader.lengths[order])]).astype(np.int64)
        temporary = f"{path}.{os.getpid()}.tmp"
        with open(temporary, "wb") as out:
            np.save(out, both)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)


class StageShuffle:
    """A shuffle of the samples that one stage draws from one source: windows of WINDOW samples, each in an order of its own."""

    def __init__(self, samples: int, words: list[int]):
        self.samples, self.words = samples, words
        self._window = lru_cache(maxsize=2)(self._make_window)

    def __getitem__(self, number: int) -> int:
        assert 0 <= number < self.samples
        window, at = divmod(number, WINDOW)
        return window * WINDOW + int(self._window(window)[at])

    def _make_window(self, window: int) -> np.ndarray:
        size = min(WINDOW, self.samples - window * WINDOW)
        return np.random.RandomState([3, *self.words, window]).permutation(size)
