# SPDX-License-Identifier: Apache-2.0
"""What goes into which bin: decided before a byte is written, so that writing can stop and go on anywhere."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from zaya_plugin.corpus.reasoning import KEPT, NO_REASONING, UNALIGNED, BlockFinder, trim
from zaya_plugin.data.indexed_reader import IndexedReader
from zaya_plugin.data.packing import best_fit_decreasing

# Documents that are fitted with each other. Bounds memory and keeps what is read for one bin within one stretch of the file;
# bins are within a few thousandths of full long before.
WINDOW = 1_000_000
LONG = ("split", "drop")


@dataclass(frozen=True)
class Piece:
    """Tokens of one bin that come from one document: a range of it, or, if it was trimmed, its own tokens."""

    document: int
    begin: int
    end: int
    trimmed: np.ndarray | None = None

    def __len__(self) -> int:
        return self.end - self.begin


@dataclass
class Fitting:
    """How documents are made to fit. long: what becomes of a document without reasoning that is too long."""

    sequence_length: int
    eod: int
    long: str
    finder: BlockFinder | None


def fit_document(
    reader: IndexedReader, number: int, fitting: Fitting, counts: Counter
) -> tuple[list[Piece], str | None]:
    """The pieces of one document, none if it is dropped, and then why."""
    limit, ids = fitting.sequence_length, reader.document(number)
    ended = len(ids) > 0 and ids[-1] == fitting.eod
    length = len(ids) + (not ended)
    if length <= limit:
        whole = None if ended else np.append(ids, ids.dtype.type(fitting.eod))
        return [Piece(number, 0, length, whole)], None
    ids = ids if ended else np.append(ids, ids.dtype.type(fitting.eod))
    if fitting.finder is not None:
        blocks = fitting.finder.find(ids)
        shortened, outcome = (None, UNALIGNED) if blocks is None else trim(ids, blocks, limit)
        if shortened is not None:
            assert outcome != KEPT and len(shortened) <= limit
            counts[outcome] += 1
            counts["trimmed tokens"] += length - len(shortened)
            return [Piece(number, 0, len(shortened), shortened)], None
        if outcome != NO_REASONING:
            return [], outcome
    if fitting.long == "drop":
        return [], "too long"
    counts["split documents"] += 1
    pieces = [
        Piece(number, begin, min(begin + limit, length), None if ended else ids) for begin in range(0, length, limit)
    ]
    counts["pieces of split documents"] += len(pieces)
    return pieces, None


def windows(
    reader: IndexedReader, fitting: Fitting, counts: Counter, dropped: Callable[[dict], None], window: int = WINDOW
) -> Iterator[list[list[Piece]]]:
    """Bins of every window of documents in order, each a list of pieces in order of their documents.

    Args:
        counts: increased here, see zaya_plugin.corpus.pack.COUNTS.
        dropped: called with number, tokens and reason of each document that is left out.
    """
    for first in range(0, len(reader), window):
        pieces: list[Piece] = []
        for number in range(first, min(first + window, len(reader))):
            counts["documents"] += 1
            found, reason = fit_document(reader, number, fitting, counts)
            pieces += found
            if reason is not None:
                tokens = int(reader.lengths[number])
                counts["dropped documents"] += 1
                counts["dropped tokens"] += tokens
                dropped({"document": number, "tokens": tokens, "reason": reason})
        lengths = np.array([len(piece) for piece in pieces], np.int64)
        bin_of, bins = best_fit_decreasing(lengths, fitting.sequence_length)
        contents: list[list[Piece]] = [[] for _ in range(bins)]
        for piece, number in zip(pieces, bin_of.tolist(), strict=True):
            contents[number].append(piece)
        counts["bins"] += bins
        counts["filling tokens"] += bins * fitting.sequence_length - int(lengths.sum())
        yield contents
