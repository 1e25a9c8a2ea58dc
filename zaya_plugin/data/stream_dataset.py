# SPDX-License-Identifier: Apache-2.0
"""Training samples of one stage with data.order=continuing, which starts where the stages before it stopped.

A source is one endless stream of tokens: epoch after epoch, each with its documents in an order of its own. How far a
source has been read is then a single number of tokens, which is valid for any sequence length, blend and stage: the
next stage repeats no token and leaves none out. The samples of a stage are a stretch of each stream, cut at multiples
of the sequence length and shuffled within that stretch.
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from zaya_plugin.data.blend import content_name
from zaya_plugin.data.fingerprint import content_fingerprint
from zaya_plugin.data.indexed_dataset import IndexedReader
from zaya_plugin.data.ledger import BlendOrder, SourceUse
from zaya_plugin.data.prepared import document_ends, marks_of, packed_length, packed_loss_mask, refuse_other_length
from zaya_plugin.data.sealed_cache import make_once
from zaya_plugin.ground.errors import mistake

# Samples shuffled with each other. Documents are in random order already; this parts the samples of one long document.
WINDOW_SAMPLES = 1 << 16


class TokenStream:
    """Tokens of an indexed dataset by position in its stream.

    Args:
        prefix: of the `.bin`/`.idx` pair.
        identity: 16 hexadecimal digits that name the content; with `seed` they decide the order.
        cache_path: folder for the orders of epochs, 8 to 16 bytes a document each; all ranks map the same files.
    """

    def __init__(self, prefix: str, identity: str, seed: int, cache_path: str):
        self.reader = IndexedReader(prefix, marks_of(prefix))
        self.seed, self.cache_path = seed, os.path.join(cache_path, identity)
        self.words = [int(identity[:8], 16), int(identity[8:16], 16)]
        self.epoch_tokens = self.reader.indexed.tokens
        self._epoch = lru_cache(maxsize=2)(self._open_epoch)

    def read(self, position: int, length: int) -> np.ndarray:
        """Return the token ids [length] from a position on, in the dtype of the file; may cross into the next epoch."""
        return np.concatenate([self.reader.stream[a:b] for a, b in self.ranges(position, length)])

    def read_marks(self, position: int, length: int) -> np.ndarray | None:
        """Return the marks uint8 [length] of these tokens; None for a dataset without chats."""
        if self.reader.marks is None:
            return None
        return np.concatenate([self.reader.marks[a:b] for a, b in self.ranges(position, length)])

    def ranges(self, position: int, length: int) -> list[tuple[int, int]]:
        """Return where in .bin these tokens are, as (first, one past the last) in order."""
        spans = []
        while length > 0:
            epoch, at = divmod(position, self.epoch_tokens)
            order, ends = self._epoch(epoch)
            rank = int(np.searchsorted(ends, at, "right"))
            while length > 0 and rank < len(order):
                document = int(order[rank])
                first = int(self.reader.starts[document + 1]) - (int(ends[rank]) - at)
                take = min(length, int(ends[rank]) - at)
                if take:
                    spans.append((first, first + take))
                at, position, length, rank = at + take, position + take, length - take, rank + 1
        return spans

    def _open_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the documents in order, and the tokens up to the end of each, int64 [documents]."""
        name = f"epoch-{epoch}-seed-{self.seed}.npy"
        path = os.path.join(self.cache_path, name)
        make_once(Path(path), content_fingerprint([self.reader.prefix]), lambda: self._make_epoch(epoch, path))
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
    """Order of the samples that one stage draws from one source: windows of WINDOW_SAMPLES, each shuffled by
    itself.
    """

    def __init__(self, samples: int, words: list[int]):
        self.samples, self.words = samples, words
        self._window = lru_cache(maxsize=2)(self._make_window)

    def __getitem__(self, number: int) -> int:
        assert 0 <= number < self.samples
        window, at = divmod(number, WINDOW_SAMPLES)
        return window * WINDOW_SAMPLES + int(self._window(window)[at])

    def _make_window(self, window: int) -> np.ndarray:
        size = min(WINDOW_SAMPLES, self.samples - window * WINDOW_SAMPLES)
        return np.random.RandomState([3, *self.words, window]).permutation(size)


class StreamDataset(torch.utils.data.Dataset):
    """A blend of token streams.

    Args:
        uses: the stage's part of each source, see zaya_plugin.data.ledger.stage_use.
        sequence_length: tokens of a sample.
        seed: of the run; with the sources' contents and positions it decides every sample.
        eod: end-of-document token, for the loss mask of packed sets.
        cache_path: folder for the orders of epochs.

    Raises:
        ValueError: a packed dataset does not fit the sequence length, or the stage would start within a bin.
    """

    def __init__(self, uses: Sequence[SourceUse], sequence_length: int, seed: int, eod: int, cache_path: str):
        self.uses, self.sequence_length, self.eod = list(uses), sequence_length, eod
        self.order = BlendOrder([use.weight for use in uses], seed)
        self.streams = [TokenStream(use.prefix, content_name([use.prefix]), seed, cache_path) for use in uses]
        self.packed = [packed_length(use.prefix) is not None for use in uses]
        for use, packed in zip(uses, self.packed, strict=True):
            refuse_other_length(use.prefix, sequence_length)
            if packed and use.before % sequence_length:
                raise mistake(
                    "data.consumed",
                    f"{use.before} {use.prefix}",
                    problem=f"{use.prefix} is packed into bins of {sequence_length} tokens, and the stage would start "
                    "inside one",
                    allowed=f"a multiple of {sequence_length}",
                    fix="the numbers that `zaya data mixture` prints for the stage before",
                )
        self.shuffles = [
            StageShuffle(use.samples, [seed, *stream.words, use.before % 2**32, use.before >> 32])
            for use, stream in zip(uses, self.streams, strict=True)
        ]

    def __len__(self) -> int:
        return sum(use.samples for use in self.uses)

    def place(self, number: int) -> tuple[int, int]:
        """Return the source of a sample and the position of its first token in that source's stream."""
        source, rank = self.order.sample(number)
        return source, self.uses[source].before + self.shuffles[source][rank] * self.sequence_length

    def __getitem__(self, number: int | None) -> dict[str, torch.Tensor | int]:
        """Return tokens, labels, position_ids int64 [s], loss_mask float32 [s], document_ends bool [s] and dataset_id.
        None: padding of a batch, without loss.
        """
        source, position = self.place(number or 0)
        text = torch.from_numpy(self.streams[source].read(position, self.sequence_length + 1).astype(np.int64))
        tokens = text[:-1].contiguous()
        marks = self.streams[source].read_marks(position, self.sequence_length)
        mask = torch.ones(self.sequence_length)
        if self.packed[source]:
            mask = torch.from_numpy(packed_loss_mask(tokens.numpy(), self.eod, marks)).float()
        return {
            "dataset_id": source,
            "tokens": tokens,
            "labels": text[1:].contiguous(),
            "loss_mask": mask if number is not None else torch.zeros_like(mask),
            "position_ids": torch.arange(self.sequence_length),
            "document_ends": torch.from_numpy(document_ends(tokens.numpy(), self.eod, marks)),
        }

    def byte_ranges(self, number: int) -> list[tuple[str, int, int]]:
        """Return the files and byte ranges that a sample is read from."""
        source, position = self.place(number)
        stream = self.streams[source]
        width = stream.reader.dtype.itemsize
        ranges = stream.ranges(position, self.sequence_length + 1)
        return [(stream.reader.prefix + ".bin", a * width, b * width) for a, b in ranges]
